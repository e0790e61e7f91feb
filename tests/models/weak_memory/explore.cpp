// Explores a scenario under Relacy, which executes it once for each schedule and for each value that a load may return.
//
//   explore SCENARIO bound SWITCHES [BUG]
//     Explores all executions with at most SWITCHES switches away from a thread that could continue. A load returns the
//     newest value or the one before.
//   explore SCENARIO random EXECUTIONS [BUG]
//     Explores EXECUTIONS random executions. A load may return one of the three newest values.
//
// BUG is the number of a planted bug. The program exits with 0 if no execution fails, else with 1 after a failing
// execution's trace.
#include <relacy/relacy.hpp>

#include <sys/mman.h>

#include <new>

#include "checked_memory.h"
#include "proxyccl/platform_host.h"
#include "scenario.h"

namespace {

using rl::debug_info;

struct Wide {
  uint64_t low, high;
};
std::ostream& operator<<(std::ostream& out, const Wide& wide) { return out << wide.low << ":" << wide.high; }

enum Kind { kAtomic, kGrowing, kWide, kData, kPrivate };

struct Word {
  const char* address;
  size_t bytes;
  Kind kind;
  alignas(rl::atomic<Wide>) char simulated[sizeof(rl::atomic<Wide>) + sizeof(rl::var<uint64_t>)];

  rl::atomic<uint64_t>& atomic() { return *reinterpret_cast<rl::atomic<uint64_t>*>(simulated); }
  rl::atomic<Wide>& wide() { return *reinterpret_cast<rl::atomic<Wide>*>(simulated); }
  rl::var<uint64_t>& data() { return *reinterpret_cast<rl::var<uint64_t>*>(simulated); }
};

constexpr unsigned kWords = 128, kThreads = 4;
Word words[kWords];
unsigned word_count;
const Scenario* scenario;

debug_info at(const CheckedSite& site) {
  const char* name = strrchr(site.file, '/');
  return debug_info(site.function, name == nullptr ? site.file : name + 1, static_cast<unsigned>(site.line));
}

void fail(const char* text, const debug_info& info) {  // the macro RL_HIST uses the names `c` and `info`
  rl::context& c = rl::ctx();
  RL_HIST(rl::user_msg_event){text} RL_HIST_END();
  c.fail_test(text, rl::test_result_user_assert_failed, info);
}

// Returns the declared word at an address, by a linear search, because an execution has few words.
Word& find(const volatile void* address, const debug_info& where) {
  const char* wanted = const_cast<const char*>(static_cast<const volatile char*>(address));
  for (unsigned i = 0; i < word_count; ++i)
    if (wanted >= words[i].address && wanted < words[i].address + words[i].bytes) return words[i];
  fail("an atomic access to memory that the scenario has not declared", where);
  abort();
}

Word& declare(void* address, size_t bytes, Kind kind) {
  if (word_count == kWords) abort();
  Word& word = words[word_count++];
  word.address = static_cast<char*>(address);
  word.bytes = bytes;
  word.kind = kind;
  return word;
}

uint64_t memory_load(const volatile void* address, size_t bytes) {
  uint64_t value = 0;
  memcpy(&value, const_cast<const void*>(address), bytes);
  return value;
}
void memory_store(volatile void* address, uint64_t value, size_t bytes) {
  memcpy(const_cast<void*>(address), &value, bytes);
}
uint64_t narrow(uint64_t value, size_t bytes) { return bytes == 8 ? value : value & ((1ull << 8 * bytes) - 1); }

rl::memory_order order_of(int order) {
  switch (order) {
    case __ATOMIC_RELAXED:
      return rl::mo_relaxed;
    case __ATOMIC_ACQUIRE:
      return rl::mo_acquire;
    case __ATOMIC_RELEASE:
      return rl::mo_release;
    case __ATOMIC_ACQ_REL:
      return rl::mo_acq_rel;
    default:
      return rl::mo_seq_cst;
  }
}

// Returns memory in place of the threads' stacks. Only each stack's top, which holds the Fiber, is accessed.
char* stacks() {
  using proxyccl::host::kStackBytes;
  static char* const base = [] {
    const size_t bytes = (kThreads + 1) * kStackBytes;
    void* mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED) abort();
    return reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(mapped) + kStackBytes - 1) & ~(kStackBytes - 1));
  }();
  return base;
}

void spin(proxyccl::host::Fiber*, uint32_t) { checked_yield(CHECKED_HERE); }
void sync_block(proxyccl::host::Fiber*) {}  // a block has one thread
// Each reading of the clock is one nanosecond later than the previous one, so the bound of a wait determines whether
// the wait times out.
uint64_t now;
uint64_t nanoseconds() { return ++now; }

void prepare_fibers() {
  using namespace proxyccl::host;
  static const EmulatorApi api = {sync_block, nullptr, nullptr, spin, nanoseconds};
  for (unsigned i = 0; i < kThreads; ++i) {
    Fiber* fiber = reinterpret_cast<Fiber*>(stacks() + (i + 1) * kStackBytes - kFiberSlot);
    *fiber = {&api, {0, 0, 0}, {i, 0, 0}, {1, 1, 1}, {kThreads, 1, 1}, 0, nullptr, nullptr};
  }
}

template <int Threads>
struct Suite : rl::test_suite<Suite<Threads>, Threads> {
  void before() {
    word_count = 0;
    now = 0;
    scenario->begin();
  }
  void thread(unsigned index) { scenario->run(index); }
  void after() {
    for (unsigned i = 0; i < word_count; ++i) {
      Word& word = words[i];
      if (word.kind == kWide)
        word.wide().~atomic();
      else if (word.kind == kData)
        word.data().~var();
      else if (word.kind != kPrivate)
        word.atomic().~atomic();
    }
  }
};

// Does what rl::simulate does, but without its exhaustive scheduler. Repeats a failing execution to print its trace.
template <template <rl::thread_id_t> class Scheduler, int Threads>
bool search(rl::test_params& params) {
  using Searched = Suite<Threads>;
  rl::ostringstream state, ignored;
  if (rl::run_test<Searched, Scheduler<Threads>>(params, state, false) == rl::test_result_success) return true;
  params.initial_state = params.final_state = state.str();
  params.collect_history = true;
  rl::run_test<Searched, Scheduler<Threads>>(params, ignored, true);
  return false;
}

// Maximum number of threads of a bounded search: each further thread costs a second of compilation.
constexpr unsigned kMostBounded = 3;

template <template <rl::thread_id_t> class Scheduler>
bool search(rl::test_params& params) {
  return scenario->threads == 2 ? search<Scheduler, 2>(params) : search<Scheduler, 3>(params);
}
bool search_random(rl::test_params& params) {
  return scenario->threads > kMostBounded ? search<rl::random_scheduler, 4>(params)
                                          : search<rl::random_scheduler>(params);
}

}  // namespace

void checked_atomic(void* address, size_t bytes) {
  new (declare(address, bytes, kAtomic).simulated) rl::atomic<uint64_t>(memory_load(address, bytes));
}
void checked_growing(void* address, size_t bytes) {
  new (declare(address, bytes, kGrowing).simulated) rl::atomic<uint64_t>(memory_load(address, bytes));
}
void checked_wide(void* address) {
  Wide value;
  memcpy(&value, address, sizeof value);
  new (declare(address, sizeof value, kWide).simulated) rl::atomic<Wide>(value);
}
void checked_data(void* address) {
  new (declare(address, 8, kData).simulated) rl::var<uint64_t>(memory_load(address, 8));
}
void checked_private(void* begin, size_t bytes) { declare(begin, bytes, kPrivate); }

uint64_t checked_load(const volatile void* address, size_t bytes, int order, CheckedSite site) {
  const debug_info where = at(site);
  Word& word = find(address, where);
  if (word.kind == kPrivate) return memory_load(address, bytes);
  if (word.kind == kData) fail("an atomic load of data", where);
  if (word.kind == kWide) {
    const Wide value = word.wide().load(order_of(order), where);
    return static_cast<const volatile char*>(address) == word.address ? value.low : value.high;
  }
  return word.atomic().load(order_of(order), where);
}

void checked_store(volatile void* address, uint64_t value, size_t bytes, int order, CheckedSite site) {
  const debug_info where = at(site);
  Word& word = find(address, where);
  if (word.kind == kData || word.kind == kWide) fail("an atomic store of another kind than declared", where);
  if (word.kind != kPrivate) word.atomic().store(narrow(value, bytes), order_of(order), where);
  if (word.kind == kGrowing && narrow(value, bytes) < memory_load(address, bytes))
    fail("a word that only grows has become smaller", where);
  memory_store(address, value, bytes);
}

void checked_store_wide(void* address, uint64_t low, uint64_t high, int order, CheckedSite site) {
  const debug_info where = at(site);
  const Wide value = {low, high};
  find(address, where).wide().store(value, order_of(order), where);
  memcpy(address, &value, sizeof value);
}

uint64_t checked_exchange(volatile void* address, uint64_t value, size_t bytes, int order, CheckedSite site) {
  Word& word = find(address, at(site));
  const uint64_t before = word.kind == kPrivate
                              ? memory_load(address, bytes)
                              : word.atomic().exchange(narrow(value, bytes), order_of(order), at(site));
  memory_store(address, value, bytes);
  return before;
}

uint64_t checked_fetch_add(volatile void* address, uint64_t value, size_t bytes, int order, CheckedSite site) {
  Word& word = find(address, at(site));
  const uint64_t before =
      word.kind == kPrivate ? memory_load(address, bytes) : word.atomic().fetch_add(value, order_of(order), at(site));
  memory_store(address, before + value, bytes);
  return before;
}

bool checked_compare_exchange(volatile void* address, void* expected, uint64_t desired, size_t bytes, int success,
                              int failure, CheckedSite site) {
  Word& word = find(address, at(site));
  uint64_t seen = memory_load(expected, bytes);
  bool exchanged;
  if (word.kind == kPrivate) {
    exchanged = memory_load(address, bytes) == seen;
    seen = memory_load(address, bytes);
  } else {
    exchanged = word.atomic().compare_exchange(rl::bool_t<false>(), seen, narrow(desired, bytes), order_of(success),
                                               order_of(failure), at(site));
  }
  if (exchanged)
    memory_store(address, desired, bytes);
  else
    memory_store(expected, seen, bytes);
  return exchanged;
}

void checked_fence(int order, CheckedSite site) { rl::atomic_thread_fence(order_of(order), at(site)); }

uint64_t checked_read(const void* address, CheckedSite site) { return find(address, at(site)).data()(at(site)).load(); }
void checked_write(void* address, uint64_t value, CheckedSite site) {
  find(address, at(site)).data()(at(site)).store(value);
  memory_store(address, value, 8);
}

void checked_copy(void* to, const void* from, size_t bytes, CheckedSite site) {
  char* target = static_cast<char*>(to);
  const char* source = static_cast<const char*>(from);
  const auto declared = [](const char* address) -> Word* {
    for (unsigned i = 0; i < word_count; ++i)
      if (words[i].address == address && words[i].kind != kPrivate) return &words[i];
    return nullptr;
  };
  for (size_t done = 0; done < bytes;) {
    Word* read = declared(source + done);
    Word* written = declared(target + done);
    const size_t step = read != nullptr ? read->bytes : written != nullptr ? written->bytes : bytes - done < 4 ? 1 : 4;
    uint64_t value = 0;
    if (read == nullptr)
      memcpy(&value, source + done, step);
    else if (read->kind == kData)
      value = checked_read(source + done, site);
    else
      value = checked_load(source + done, step, __ATOMIC_RELAXED, site);
    if (written == nullptr)
      memcpy(target + done, &value, step);
    else if (written->kind == kData)
      checked_write(target + done, value, site);
    else
      checked_store(target + done, value, step, __ATOMIC_RELAXED, site);
    done += step;
  }
}

uint32_t checked_thread(void) { return rl::thread_index(); }
void checked_yield(CheckedSite site) { rl::yield(1, at(site)); }
void* checked_frame(void) { return stacks() + checked_thread() * proxyccl::host::kStackBytes; }
void checked_assert(bool condition, const char* text, CheckedSite site) {
  if (!condition) fail(text, at(site));
}

int checked_planted;

int main(int argc, char** argv) {
  for (unsigned i = 0; argc >= 4 && i < kScenarioCount; ++i)
    if (strcmp(kScenarios[i].name, argv[1]) == 0) scenario = &kScenarios[i];
  const bool random = argc >= 4 && strcmp(argv[2], "random") == 0;
  const bool bound = scenario != nullptr && strcmp(argv[2], "bound") == 0 && scenario->threads <= kMostBounded;
  if (scenario == nullptr || random == bound) {
    fprintf(stderr, "usage: explore SCENARIO bound SWITCHES [BUG] | explore SCENARIO random EXECUTIONS [BUG]\n");
    return 2;
  }
  if (argc > 4) checked_planted = atoi(argv[4]);
  prepare_fibers();
  rl::test_params params;
  std::ostringstream progress;  // receives Relacy's progress reports, which must not be printed
  params.progress_stream = &progress;
  params.search_type = random ? rl::sched_random : rl::sched_bound;
  params.iteration_count = strtoull(argv[3], nullptr, 10);
  params.context_bound = static_cast<unsigned>(params.iteration_count);
  params.execution_depth_limit = 4000;
  const bool right = random ? search_random(params) : search<rl::context_bound_scheduler>(params);
  printf("%s: %s after %llu executions\n", scenario->name, rl::test_result_str(params.test_result),
         static_cast<unsigned long long>(params.stop_iteration));
  return right ? 0 : 1;
}
