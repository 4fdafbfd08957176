#pragma once

#include <memory>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "bonfire/base/api.h"
#include "bonfire/comm/store_client.h"
#include "bonfire/comm/store_server.h"

namespace bonfire {

// A StoreServer as c10d knows stores: process groups of Gloo and NCCL connect through it. Safe to use from any thread.
class BONFIRE_API TokenStore : public c10d::Store {
 public:
  // `server`, where given, lives as long as this store and its clones: for the rank that hosts it.
  explicit TokenStore(std::shared_ptr<StoreClient> client, std::shared_ptr<StoreServer> server = nullptr);
  ~TokenStore() override;

  c10::intrusive_ptr<c10d::Store> clone() override;

  using c10d::Store::compareSet;
  using c10d::Store::set;
  void set(const std::string& key, const std::vector<uint8_t>& value) override;
  std::vector<uint8_t> compareSet(const std::string& key, const std::vector<uint8_t>& expected,
                                  const std::vector<uint8_t>& desired) override;
  std::vector<uint8_t> get(const std::string& key) override;
  int64_t add(const std::string& key, int64_t value) override;
  bool deleteKey(const std::string& key) override;
  bool check(const std::vector<std::string>& keys) override;
  int64_t getNumKeys() override;
  void wait(const std::vector<std::string>& keys) override;
  void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) override;
  void append(const std::string& key, const std::vector<uint8_t>& value) override;
  std::vector<std::vector<uint8_t>> multiGet(const std::vector<std::string>& keys) override;
  void multiSet(const std::vector<std::string>& keys, const std::vector<std::vector<uint8_t>>& values) override;
  bool hasExtendedApi() const override { return true; }
  std::vector<std::string> listKeys() override;

  // A secret that all who have the job's token have, too, and nobody else.
  std::string secret() const { return client_->secret(); }

 private:
  // The order matters: the client must be gone before the server waits for its last guest.
  std::shared_ptr<StoreServer> server_;
  std::shared_ptr<StoreClient> client_;
};

// The secret of the TokenStore behind prefixes; empty where another kind of store is.
BONFIRE_API std::string secret_behind(const c10::intrusive_ptr<c10d::Store>& store);

}  // namespace bonfire
