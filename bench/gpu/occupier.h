#pragma once

struct CUstream_st;
struct OccupierFlags;

// Takes multiprocessors of the current GPU away from everybody else, as communication does that runs beside computing.
class Occupier {
 public:
  // Returns when `multiprocessors` of them are taken, and gives them back at its end, or after some seconds.
  explicit Occupier(int multiprocessors);
  ~Occupier();
  Occupier(const Occupier&) = delete;
  Occupier& operator=(const Occupier&) = delete;

 private:
  OccupierFlags* flags_ = nullptr;
  CUstream_st *stream_ = nullptr, *beside_ = nullptr;
};
