// A thread that waits in a kernel or a stream runs helpers or yields the core. A thread whose kernel has ended runs
// helpers once.
//
// A helper is a proxy of this process. If ranks outnumber cores, a thread that waits for its proxy would have to give
// its core to the proxy's thread and get the core back. Instead, the waiting thread does the proxy's work. A kernel
// whose peers' data has already arrived never waits. So helpers also run when a kernel ends: otherwise the kernel's
// triggers would stay in the ring until the proxy's thread wakes.
//
// A waiting thread also calls lookAround(): Python runs signal handlers only in its main thread, and the main thread
// may be the waiting thread.
#include "link_old_symbols.h"

#include <pthread.h>
#include <sched.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>
#include <new>
#include <vector>

#include "fibers.h"
#include "runtime.h"
#include "status.h"

extern "C" void* __tsan_get_current_fiber() __attribute__((weak));  // null unless under ThreadSanitizer

namespace proxyccl {
namespace host {
namespace {

class Helpers {
 public:
  void add(int (*help)(void*, int), void* argument) {
    std::lock_guard<std::mutex> lock(mutex_);
    helpers_.push_back({help, argument});
    count_.store(helpers_.size(), std::memory_order_relaxed);
  }

  void remove(void* argument) {
    std::lock_guard<std::mutex> lock(mutex_);
    helpers_.erase(std::remove_if(helpers_.begin(), helpers_.end(),
                                  [&](const Helper& helper) { return helper.argument == argument; }),
                   helpers_.end());
    count_.store(helpers_.size(), std::memory_order_relaxed);
  }

  bool help(bool waits) {
    // Does nothing under ThreadSanitizer, which would not see races between kernel and proxy if one thread ran both.
    if (__tsan_get_current_fiber) return false;
    if (count_.load(std::memory_order_relaxed) == 0) return false;  // relaxed: the lock orders accesses to the list
    std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
    if (!lock.owns_lock()) return false;
    bool helped = false;
    for (const Helper& helper : helpers_) helped |= helper.help(helper.argument, waits) != 0;
    return helped;
  }

 private:
  struct Helper {
    int (*help)(void*, int);
    void* argument;
  };

  std::mutex mutex_;  // guards the list; held while helpers run, so that no helper is removed while it runs
  std::vector<Helper> helpers_;
  std::atomic<size_t> count_{0};
};

[[maybe_unused]] const int kForksStartAnew = pthread_atfork(nullptr, nullptr, Lasting<Helpers>::startAnew);

constexpr uint32_t kYields = 200;

using Clock = std::chrono::steady_clock;
std::atomic<pthread_t> looking_thread{};
std::atomic<void (*)(void*)> look{nullptr};
thread_local void* running_here = nullptr;  // the stream whose work this thread, looking_thread, runs; else null
thread_local bool is_looking = false;
thread_local Clock::time_point looked;  // the last time that timeToLook() returned true; 0 before the first long wait

}  // namespace

void backOff(uint32_t rounds) {
  constexpr long kFirstSleepNs = 2000, kLongestSleepNs = 100000;
  if (Lasting<Helpers>::get().help(true)) return;
  if (rounds < kYields) {
    sched_yield();
    return;
  }
  const uint32_t doublings = (rounds - kYields) / 32;
  const long sleep = doublings < 6 ? kFirstSleepNs << doublings : kLongestSleepNs;
  const timespec pause = {0, sleep};
  nanosleep(&pause, nullptr);
}

void helpOut() { Lasting<Helpers>::get().help(false); }

RunsHere::RunsHere(void* stream) {
  if (look.load(std::memory_order_relaxed) == nullptr) return;
  if (!pthread_equal(pthread_self(), looking_thread.load(std::memory_order_relaxed))) return;
  running_here = stream;
  looked = {};
}
RunsHere::~RunsHere() { running_here = nullptr; }

bool mayLook() { return running_here != nullptr; }

bool timeToLook(uint32_t rounds) {
  if (rounds < kYields || !mayLook()) return false;
  const Clock::time_point now = Clock::now();
  if (looked == Clock::time_point{}) looked = now;  // starts the first interval only now: most waits are too short
  if (now - looked < kBetweenLooks) return false;
  looked = now;
  return true;
}

void lookAround() {
  is_looking = true;
  look.load(std::memory_order_relaxed)(running_here);
  is_looking = false;
}

}  // namespace host
}  // namespace proxyccl

using namespace proxyccl::host;

void proxyccl_host_add_helper(int (*help)(void*, int), void* argument) {
  (void)statusOf([=] {
    Lasting<Helpers>::get().add(help, argument);
    return PROXYCCL_HOST_SUCCESS;
  });
}
void proxyccl_host_look_around(uint64_t thread, void (*function)(void*)) {
  looking_thread.store(static_cast<pthread_t>(thread), std::memory_order_relaxed);
  look.store(function, std::memory_order_relaxed);
}
int proxyccl_host_is_looking(void) { return is_looking; }
void proxyccl_host_remove_helper(void* argument) { Lasting<Helpers>::get().remove(argument); }
