#include "bonfire/comm/token_store.h"

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "bonfire/comm/store_bytes.h"

namespace bonfire {
namespace {

using Bytes = StoreBytes;

// c10d's callers tell a late key from a lost server by the type of the exception.
template <class Function>
auto translated(const std::vector<std::string>& keys, const Function& function) {
  try {
    return function();
  } catch (const StoreTimeout& error) {
    std::string names;
    for (std::size_t i = 0; i < keys.size() && i < 8; ++i) names += (i == 0 ? "" : ", ") + keys[i];
    C10_THROW_ERROR(DistStoreError, std::string(error.what()) + " while waiting for " + names);
  } catch (const Error& error) {
    C10_THROW_ERROR(DistNetworkError, error.what());
  }
}

// c10d calls "no timeout" zero.
std::chrono::milliseconds patience(std::chrono::milliseconds timeout) {
  return timeout == c10d::Store::kNoTimeout ? std::chrono::milliseconds(std::chrono::hours(24 * 365)) : timeout;
}

}  // namespace

TokenStore::TokenStore(std::shared_ptr<StoreClient> client, std::shared_ptr<StoreServer> server)
    : server_(std::move(server)), client_(std::move(client)) {}

TokenStore::~TokenStore() = default;

c10::intrusive_ptr<c10d::Store> TokenStore::clone() {
  auto copy = c10::make_intrusive<TokenStore>(client_, server_);
  copy->setTimeout(timeout_);
  return copy;
}

void TokenStore::set(const std::string& key, const Bytes& value) {
  translated({key}, [&] { client_->set(key, text_of(value)); });
}

Bytes TokenStore::compareSet(const std::string& key, const Bytes& expected, const Bytes& desired) {
  return translated({key}, [&] { return bytes_of(client_->compare_set(key, text_of(expected), text_of(desired))); });
}

Bytes TokenStore::get(const std::string& key) {
  return translated({key}, [&] { return bytes_of(client_->get({key}, patience(timeout_)).front()); });
}

int64_t TokenStore::add(const std::string& key, int64_t value) {
  return translated({key}, [&] { return client_->add(key, value); });
}

bool TokenStore::deleteKey(const std::string& key) {
  return translated({key}, [&] { return client_->remove(key); });
}

bool TokenStore::check(const std::vector<std::string>& keys) {
  return translated(keys, [&] { return client_->check(keys); });
}

int64_t TokenStore::getNumKeys() {
  return translated({}, [&] { return client_->count(); });
}

void TokenStore::wait(const std::vector<std::string>& keys) { wait(keys, timeout_); }

void TokenStore::wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) {
  translated(keys, [&] { client_->wait(keys, patience(timeout)); });
}

void TokenStore::append(const std::string& key, const Bytes& value) {
  translated({key}, [&] { client_->append(key, text_of(value)); });
}

std::vector<Bytes> TokenStore::multiGet(const std::vector<std::string>& keys) {
  return translated(keys, [&] {
    std::vector<Bytes> values;
    for (const std::string& value : client_->get(keys, patience(timeout_))) values.push_back(bytes_of(value));
    return values;
  });
}

void TokenStore::multiSet(const std::vector<std::string>& keys, const std::vector<Bytes>& values) {
  translated(keys, [&] {
    std::vector<std::string> texts;
    for (const Bytes& value : values) texts.push_back(text_of(value));
    client_->multi_set(keys, texts);
  });
}

std::vector<std::string> TokenStore::listKeys() {
  return translated({}, [&] { return client_->list(); });
}

std::string secret_behind(const c10::intrusive_ptr<c10d::Store>& store) {
  if (auto* prefixed = dynamic_cast<c10d::PrefixStore*>(store.get()))
    return secret_behind(prefixed->getUnderlyingNonPrefixStore());
  const auto* ours = dynamic_cast<const TokenStore*>(store.get());
  return ours == nullptr ? "" : ours->secret();
}

}  // namespace bonfire
