#include "bonfire/data/loader.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>

#include "bonfire/base/error.h"
#include "bonfire/data/classes.h"
#include "bonfire/data/markov.h"

namespace bonfire::loader_test {
namespace {

// Sample i is i, i + 1, ...: what a batch holds can be read from it.
class Counting : public TokenSource {
 public:
  explicit Counting(std::uint64_t size) : size_(size) {}
  std::uint64_t size() const override { return size_; }
  std::int64_t vocab() const override { return 1 << 20; }
  std::int64_t sequence() const override { return 3; }
  void window(std::uint64_t index, std::span<std::int64_t> tokens) const override {
    ++reads;
    if (index == broken) fail("sample {} is broken", index);
    for (std::size_t at = 0; at < tokens.size(); ++at) tokens[at] = static_cast<std::int64_t>(index * 10 + at);
  }

  mutable std::atomic<int> reads = 0;
  std::uint64_t broken = unbounded;

 private:
  std::uint64_t size_;
};

using Samples = std::vector<std::uint64_t>;

void check_contents(const Batch& batch) {
  ASSERT_EQ(batch.input.sizes(), (std::vector<std::int64_t>{static_cast<std::int64_t>(batch.samples.size()), 3}));
  ASSERT_EQ(batch.target.sizes(), batch.input.sizes());
  ASSERT_EQ(batch.input.scalar_type(), at::kLong);
  for (std::size_t row = 0; row < batch.samples.size(); ++row) {
    for (int at = 0; at < 3; ++at) {
      const auto first = static_cast<std::int64_t>(batch.samples[row] * 10);
      EXPECT_EQ(batch.input.const_data_ptr<std::int64_t>()[row * 3 + at], first + at);
      EXPECT_EQ(batch.target.const_data_ptr<std::int64_t>()[row * 3 + at], first + at + 1);
    }
  }
}

// What all ranks together saw in each step, rank after rank.
std::vector<Samples> steps_of(const std::shared_ptr<Counting>& source, LoaderOptions options,
                              std::size_t most_steps = 1000) {
  std::vector<Samples> steps;
  for (int rank = 0; rank < options.ranks; ++rank) {
    options.rank = rank;
    Loader loader(source, options);
    for (std::size_t at = 0; at < most_steps; ++at) {
      const auto step = loader.next();
      if (!step) break;
      if (rank == 0) steps.emplace_back();
      for (const auto& batch : step->microbatches) {
        check_contents(batch);
        EXPECT_LE(batch.input.size(0), options.microbatch ? options.microbatch : options.batch);
        steps.at(at).insert(steps.at(at).end(), batch.samples.begin(), batch.samples.end());
      }
    }
  }
  return steps;
}

TEST(Loader, TheOrderDoesNotDependOnRanksOrMicrobatch) {
  const auto source = std::make_shared<Counting>(50);
  const auto alone = steps_of(source, {.batch = 12, .seed = 7}, 11);
  ASSERT_EQ(alone.size(), 11);
  for (const int ranks : {1, 2, 3, 4, 12})
    for (const std::int64_t microbatch : {0, 1, 2, 3, 5})
      for (const int prefetch : {0, 1, 3})
        EXPECT_EQ(
            steps_of(source, {.batch = 12, .microbatch = microbatch, .ranks = ranks, .seed = 7, .prefetch = prefetch}, 11),
            alone);
  EXPECT_NE(steps_of(source, {.batch = 12, .seed = 8}, 11), alone);
}

TEST(Loader, EverySampleOnceAnEpoch) {
  const auto source = std::make_shared<Counting>(37);
  for (const int ranks : {1, 2, 3, 8}) {
    const auto steps = steps_of(source, {.batch = 8, .ranks = ranks, .epochs = 3, .drop_last = false});
    Samples all;
    for (const auto& step : steps) all.insert(all.end(), step.begin(), step.end());
    ASSERT_EQ(all.size(), 3 * 37);
    for (int epoch = 0; epoch < 3; ++epoch) {
      std::sort(all.begin() + epoch * 37, all.begin() + (epoch + 1) * 37);
      for (std::uint64_t at = 0; at < 37; ++at) EXPECT_EQ(all[epoch * 37 + at], at);
    }
    EXPECT_EQ(steps_of(source, {.batch = 8, .ranks = ranks, .epochs = 1}).size(), 37 / 8);
  }
}

TEST(Loader, AtTheEndARankMayHaveNothing) {
  const auto source = std::make_shared<Counting>(10);
  LoaderOptions options{.batch = 8, .microbatch = 1, .ranks = 4, .epochs = 1, .drop_last = false};
  std::size_t last_samples = 0;
  bool somebody_has_nothing = false;
  for (options.rank = 0; options.rank < 4; ++options.rank) {
    Loader loader(source, options);
    EXPECT_EQ(loader.next()->microbatches.size(), 2);
    const auto last = loader.next();
    ASSERT_TRUE(last);
    EXPECT_EQ(last->samples, 2);
    last_samples += last->microbatches.size();
    somebody_has_nothing |= last->microbatches.empty();
    EXPECT_FALSE(loader.next());
    EXPECT_FALSE(loader.next());
    EXPECT_EQ(loader.samples_taken(), 10);
  }
  EXPECT_EQ(last_samples, 2);
  EXPECT_TRUE(somebody_has_nothing);
}

TEST(Loader, GoesOnFromItsStateWithOtherRanksAndBatch) {
  const auto source = std::make_shared<Counting>(29);
  const auto undisturbed = steps_of(source, {.batch = 6, .seed = 2}, 20);
  Samples expected;
  for (const auto& step : undisturbed) expected.insert(expected.end(), step.begin(), step.end());

  for (const std::size_t stop : {0, 1, 7}) {
    Loader first(source, {.batch = 6, .ranks = 2, .seed = 2, .prefetch = 4});
    for (std::size_t at = 0; at < stop; ++at) first.next();
    const auto state = first.save();  // what was read ahead is not taken
    EXPECT_EQ(state, (State{{"samples", static_cast<std::int64_t>(6 * stop)}}));

    for (const std::int64_t batch : {6, 4}) {
      Samples rest;
      std::vector<std::unique_ptr<Loader>> loaders;
      for (int rank = 0; rank < 3; ++rank) {
        loaders.push_back(
            std::make_unique<Loader>(source, LoaderOptions{.batch = batch, .rank = rank, .ranks = 3, .seed = 2}));
        loaders.back()->next();  // load() forgets what was under way
        loaders.back()->load(state);
      }
      while (static_cast<std::int64_t>(rest.size()) + batch <= 60) {
        for (auto& loader : loaders) {
          const auto step = loader->next();
          for (const auto& part : step->microbatches) rest.insert(rest.end(), part.samples.begin(), part.samples.end());
        }
      }
      const auto from = expected.begin() + static_cast<std::ptrdiff_t>(6 * stop);
      EXPECT_EQ(rest, Samples(from, from + static_cast<std::ptrdiff_t>(rest.size())));
    }
  }
}

TEST(Loader, RefusesAForeignState) {
  Loader loader(std::make_shared<Counting>(29), {});
  EXPECT_THROW(loader.load({}), Error);
  EXPECT_THROW(loader.load({{"samples", std::string("many")}}), Error);
  EXPECT_THROW(loader.load({{"samples", std::int64_t{-1}}}), Error);
}

TEST(Loader, ThrowsTheSourcesErrorWhereItHappened) {
  for (const int prefetch : {0, 2}) {
    const auto source = std::make_shared<Counting>(40);
    source->broken = 17;
    Loader loader(source, {.batch = 5, .shuffle = false, .prefetch = prefetch});
    for (int step = 0; step < 3; ++step) EXPECT_TRUE(loader.next());
    for (int again = 0; again < 2; ++again) {
      try {
        loader.next();
        FAIL();
      } catch (const Error& error) {
        EXPECT_STREQ(error.what(), "sample 17 is broken");
      }
    }
    EXPECT_EQ(loader.samples_taken(), 15);
    loader.seek(20);
    EXPECT_EQ(loader.next()->microbatches.at(0).samples.front(), 20);
  }
}

// Notes every read that comes too early.
class Patient : public Counting {
 public:
  Patient() : Counting(unbounded) {}
  void window(std::uint64_t index, std::span<std::int64_t> tokens) const override {
    if (reads >= allowed) ++too_early;
    Counting::window(index, tokens);
  }
  mutable std::atomic<int> allowed = 0, too_early = 0;
};

TEST(Loader, ReadsAsFarAheadAsAskedAndNoFurther) {
  const auto source = std::make_shared<Patient>();
  constexpr int batch = 4, prefetch = 3, steps = 200;
  {
    Loader loader(source, {.batch = batch, .prefetch = prefetch});
    for (int step = 1; step <= steps; ++step) {
      source->allowed = batch * (step + prefetch);  // the steps taken, and those ahead
      loader.next();
      const auto until = std::chrono::steady_clock::now() + std::chrono::minutes(1);
      while (source->reads < source->allowed && std::chrono::steady_clock::now() < until) std::this_thread::yield();
      ASSERT_GE(source->reads, source->allowed) << "step " << step;
    }
  }
  EXPECT_EQ(source->reads, batch * (steps + prefetch));
  EXPECT_EQ(source->too_early, 0);
}

TEST(Loader, ManyCanBeStoppedAtAnyMomentAndGoOnAnywhere) {
  const auto source = std::make_shared<Counting>(1000);
  for (int round = 0; round < 200; ++round) {
    Loader loader(source, {.batch = 2, .prefetch = 1 + round % 3});
    for (int step = 0; step < round % 5; ++step) loader.next();
    EXPECT_EQ(loader.samples_taken(), 2 * (round % 5));
    if (round % 2 == 0) continue;  // it goes while its reader is at work
    loader.seek(static_cast<std::uint64_t>(round));
    Loader plain(source, {.batch = 2, .prefetch = 0});
    plain.seek(static_cast<std::uint64_t>(round));
    for (int step = 0; step < 3; ++step)
      EXPECT_EQ(loader.next()->microbatches.at(0).samples, plain.next()->microbatches.at(0).samples) << "round " << round;
    EXPECT_EQ(loader.samples_taken(), round + 6);
  }
}

TEST(Loader, AForLoopSeesOneBatchAStep) {
  const auto source = std::make_shared<Counting>(7);
  for (const int rank : {0, 1}) {
    Loader loader(source, {.batch = 3, .rank = rank, .ranks = 2, .epochs = 1, .drop_last = false});
    std::vector<std::size_t> sizes;
    for (auto& batch : loader) {
      check_contents(batch);
      sizes.push_back(batch.samples.size());
    }
    EXPECT_EQ(sizes, rank == 0 ? (std::vector<std::size_t>{1, 1, 0}) : (std::vector<std::size_t>{2, 2, 1}));
  }
  Loader cut(source, {.batch = 3, .microbatch = 1});
  EXPECT_THROW(cut.begin(), Error);
}

TEST(Loader, RefusesWhatCannotBe) {
  const auto source = std::make_shared<Counting>(7);
  EXPECT_THROW(Loader(source, {.batch = 0}), ConfigError);
  EXPECT_THROW(Loader(source, {.batch = 8, .epochs = 1}), ConfigError);
  EXPECT_THROW(Loader(source, {.batch = 1, .microbatch = -1}), ConfigError);
  EXPECT_THROW(Loader(source, {.batch = 1, .rank = 2, .ranks = 2}), Error);
  EXPECT_THROW(Loader(std::make_shared<Counting>(0), {}), ConfigError);
}

TEST(Loader, NotesItsTime) {
  Trace trace;
  Loader loader(std::make_shared<Counting>(7), {.batch = 3, .prefetch = 0, .trace = &trace});
  loader.next();
  ASSERT_EQ(trace.spans().size(), 1);
  EXPECT_EQ(trace.spans()[0].category, "data");
}

TEST(Split, PartsAreDisjointAndComplete) {
  const auto source = std::make_shared<Counting>(20);
  for (const double fraction : {0.01, 0.1, 0.5, 0.99}) {
    const auto parts = split(source, fraction);
    EXPECT_EQ(parts.train->size() + parts.held_out->size(), 20);
    EXPECT_GE(parts.train->size(), 1);
    EXPECT_GE(parts.held_out->size(), 1);
    std::vector<std::int64_t> input(3), target(3);
    for (std::uint64_t index = 0; index < 20; ++index) {
      const bool train = index < parts.train->size();
      (train ? parts.train : parts.held_out)->read(train ? index : index - parts.train->size(), input.data(), target.data());
      EXPECT_EQ(input[0], static_cast<std::int64_t>(index * 10));
    }
    EXPECT_THROW(parts.held_out->read(parts.held_out->size(), input.data(), target.data()), Error);
  }
  EXPECT_THROW(split(source, 0), ConfigError);
  EXPECT_THROW(split(source, 1), ConfigError);
  EXPECT_THROW(split(std::make_shared<Counting>(1), 0.5), ConfigError);
}

TEST(Classes, TheNearestPatternIsTheClass) {
  const auto source = std::make_shared<ClassSource>(ClassOptions{.seed = 3, .classes = 5, .sizes = {3, 8, 8}, .noise = 0.5});
  Loader loader(source, {.batch = 200});
  const auto batch = std::move(loader.next()->microbatches.at(0));
  EXPECT_EQ(batch.input.sizes(), (std::vector<std::int64_t>{200, 3, 8, 8}));
  EXPECT_EQ(batch.input.scalar_type(), at::kFloat);
  EXPECT_EQ(batch.target.sizes(), (std::vector<std::int64_t>{200}));
  std::vector<int> seen(5);
  double squares = 0;
  for (int sample = 0; sample < 200; ++sample) {
    const float* input = batch.input.const_data_ptr<float>() + sample * 192;
    std::vector<double> distance(5);
    for (int candidate = 0; candidate < 5; ++candidate)
      for (int at = 0; at < 192; ++at) distance[candidate] += std::pow(input[at] - source->pattern(candidate, at), 2);
    const auto target = batch.target.const_data_ptr<std::int64_t>()[sample];
    EXPECT_EQ(std::min_element(distance.begin(), distance.end()) - distance.begin(), target);
    squares += distance.at(target) / 192 / 200;
    ++seen.at(target);
  }
  EXPECT_NEAR(squares, 0.25, 0.02);
  for (const int count : seen) EXPECT_GT(count, 15);
}

}  // namespace
}  // namespace bonfire::loader_test
