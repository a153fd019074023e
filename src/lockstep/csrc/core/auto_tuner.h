// Chooses the faster of two variants by timing both now and then.
//
//     call      0 1  2 3  4 5  6 7  8 ...... 31  32 33  34 ...... 63  64 65
//     variant   A A  B B  A A  B B  the faster    A A    the faster    B B
//     timed       x    x    x    x                  x                    x
//
// All ranks count the same calls, so all try the same variant at the same time, and each
// rank measures what the whole group's choice costs. Ranks that then settle on different
// variants only lose time. The first call of a trial finds the caches as the other variant
// left them and is not timed. The median of the last three times of a variant ignores one
// call that another program delayed. In steady state the slower variant costs 2 of 64
// calls, and a change of the machine is followed after 2 trials of a variant, or at once
// if the chosen variant, in the median of 3 calls between trials, takes more than 1.5
// times what the other one took in its last trials.
//
// Why at run time: non-temporal stores took 0.8 us for 32 KiB that another core had read
// last, and ordinary stores 10 us; with memory that is updated in place the ordinary ones
// win. It depends on whether two cores share a cache, and the cores of a virtual machine
// move: within minutes the same code took 12, 28 and 106 us for 128 KiB.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

namespace lockstep {

class AutoTuner {
 public:
  static constexpr uint32_t kTrialCalls = 2;  // of one variant in a row
  static constexpr uint32_t kInitialTrials = 4;
  static constexpr uint32_t kTrialPeriod = 32;  // calls from one later trial to the next

  // Returns the variant, 0 or 1, for the call that begins now.
  int choose() const { return is_trial() ? trial_variant() : faster(); }

  // Records how long that call took, in any unit, and ends it.
  void record(double time) {
    if (!is_trial())
      monitor(static_cast<size_t>(faster()), time);
    else if (calls_ % kTrialCalls == kTrialCalls - 1)
      times_[static_cast<size_t>(trial_variant())].add(time);
    ++calls_;
  }

  // Returns the variant that is used between trials; 0 if both are equal.
  int faster() const { return times_[1].median() < times_[0].median() ? 1 : 0; }

 private:
  struct LastTimes {
    std::array<double, 3> values{};
    uint32_t count = 0;
    void add(double time) { values[count++ % 3] = time; }
    // The minimum if there are fewer than three, and 0 if there are none.
    double median() const {
      std::array<double, 3> sorted = values;
      const uint32_t known = std::min(count, 3u);
      std::sort(sorted.begin(), sorted.begin() + known);
      return sorted[known == 3 ? 1 : 0];
    }
  };

  // Notices when the chosen variant becomes much slower. A factor below 1.5 may be caused
  // by another program.
  void monitor(size_t chosen, double time) {
    if (chosen != monitored_) recent_ = {};
    monitored_ = chosen;
    recent_.add(time);
    if (recent_.count < 3 || recent_.median() <= 1.5 * times_[1 - chosen].median()) return;
    times_[chosen] = recent_;  // so the other variant is the faster one from now on
    recent_ = {};
  }

  bool is_initial() const { return calls_ < kTrialCalls * kInitialTrials; }
  bool is_trial() const { return is_initial() || calls_ % kTrialPeriod < kTrialCalls; }
  int trial_variant() const {
    return static_cast<int>((is_initial() ? calls_ / kTrialCalls : calls_ / kTrialPeriod - 1) % 2);
  }

  std::array<LastTimes, 2> times_;  // in trials, by variant
  LastTimes recent_;                // of the chosen variant, between trials
  size_t monitored_ = 0;
  uint32_t calls_ = 0;
};

}  // namespace lockstep
