// Streams, events and launches of the host runtime.
//
// A stream is a queue with a thread, or runs everything in the calling thread. A launch runs its first block in that
// thread, and each other block in a thread from a pool, because blocks of communication kernels wait for one another.
#include "link_old_symbols.h"

#include <dlfcn.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <exception>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "fibers.h"
#include "proxyccl/platform_host_memmove.h"
#include "runtime.h"
#include "status.h"

namespace proxyccl {
namespace host {
namespace {

// A pool of threads that run blocks. The pool grows so that every submitted task has a thread immediately.
class BlockThreads {
 public:
  // Runs each task in a separate thread. Throws, without running any, if there can't be enough threads.
  void submit(std::list<std::function<void()>> tasks) {
    std::lock_guard<std::mutex> lock(mutex_);
    const size_t added = tasks.size();
    while (idle_ + starting_ < tasks_.size() + added) {
      std::thread([this] { work(); }).detach();
      ++starting_;
    }
    tasks_.splice(tasks_.end(), tasks);
    for (size_t i = 0; i < added; ++i) ready_.notify_one();
  }

 private:
  void work() {
    pthread_setname_np(pthread_self(), "proxyccl-blocks");  // the name that top and debuggers show
    std::unique_lock<std::mutex> lock(mutex_);
    --starting_;
    for (;;) {
      while (tasks_.empty()) {
        ++idle_;
        ready_.wait(lock);
        --idle_;
      }
      std::function<void()> task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      task();
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable ready_;
  std::list<std::function<void()>> tasks_;
  size_t starting_ = 0, idle_ = 0;
};

[[maybe_unused]] const int kForksStartAnew = pthread_atfork(nullptr, nullptr, Lasting<BlockThreads>::startAnew);

// Waits for a condition, and calls lookAround() while it waits if mayLook().
template <class Condition>
void waitFor(std::unique_lock<std::mutex>& lock, std::condition_variable& changed, Condition condition) {
  if (!mayLook()) {
    changed.wait(lock, condition);
    return;
  }
  while (!changed.wait_for(lock, kBetweenLooks, condition)) {
    lock.unlock();
    lookAround();
    lock.lock();
  }
}

struct Module;

struct Function {
  void (*entry)(void**);
  const uint32_t* parameters;
  size_t tls_module;
  const Module* module;
};

struct Module {
  void* library;
  ProxycclControl* default_control = nullptr;
  std::mutex mutex;
  std::map<std::string, Function> functions;
};

// A barrier of a launch's threads before any block begins. If a thread can't allocate its memory, no block runs.
class Start {
 public:
  explicit Start(uint32_t threads) : missing_(threads) {}

  // Called once by each thread; `ready` says whether it has its memory. Returns whether all threads have their memory.
  bool meet(bool ready) {
    std::unique_lock<std::mutex> lock(mutex_);
    ready_ &= ready;
    if (--missing_ == 0)
      all_here_.notify_all();
    else
      waitFor(lock, all_here_, [&] { return missing_ == 0; });
    return ready_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable all_here_;
  uint32_t missing_;
  bool ready_ = true;
};

// Runs all blocks of a launch, the first in this thread, and returns at their end. Throws if a thread can't be started.
int runLaunch(const Launch& launch) {
  const uint32_t blocks = launch.grid.x * launch.grid.y * launch.grid.z;
  const uint32_t resident = std::min<uint32_t>(blocks, PROXYCCL_HOST_MAX_RESIDENT_BLOCKS);
  // Each thread begins with its own block. If a thread took the next free block, one thread might run several blocks in
  // order, which would hide the blocks' races from a sanitizer.
  std::atomic<uint32_t> next{resident};
  std::atomic<bool> failed{false}, begun{false};
  Start start(resident);
  auto work = [&](uint32_t first) {
    const bool ready = prepareBlocks(launch);
    if (!(resident > 1 ? start.meet(ready) : ready)) return;
    begun = true;
    for (uint32_t block = first; block < blocks; block = next.fetch_add(1))
      if (runBlock(launch, block) != BlockResult::kDone) failed = true;
    helpOut();
  };
  std::mutex mutex;
  std::condition_variable done;
  uint32_t running = resident - 1;
  std::list<std::function<void()>> others;
  for (uint32_t first = 1; first < resident; ++first)
    others.emplace_back([&, first] {
      work(first);
      std::lock_guard<std::mutex> lock(mutex);
      if (--running == 0) done.notify_one();
    });
  if (!others.empty()) Lasting<BlockThreads>::get().submit(std::move(others));
  work(0);
  std::unique_lock<std::mutex> lock(mutex);
  waitFor(lock, done, [&] { return running == 0; });
  if (!begun) return PROXYCCL_HOST_OUT_OF_MEMORY;
  return failed ? PROXYCCL_HOST_LAUNCH_FAILED : PROXYCCL_HOST_SUCCESS;
}

class Stream {
 public:
  explicit Stream(int kind) : kind_(kind) {
    if (kind_ == PROXYCCL_HOST_QUEUED) thread_ = std::thread([this] { work(); });
  }

  ~Stream() {
    {
      std::lock_guard<std::mutex> lock(mutex_);  // waits for a running operation of another caller
      stopping_ = true;
    }
    if (kind_ != PROXYCCL_HOST_QUEUED) return;
    changed_.notify_all();
    thread_.join();
  }

  bool mayWait() const { return kind_ != PROXYCCL_HOST_INLINE; }

  // If enqueue() throws, nothing is queued. `operation` is not a std::function, which would allocate memory even if the
  // operation runs in the caller.
  template <class Operation>
  int enqueue(Operation operation) {
    if (kind_ == PROXYCCL_HOST_INLINE) return operation();
    if (kind_ == PROXYCCL_HOST_IN_CALLER) {
      if (proxyccl_host_is_looking()) return PROXYCCL_HOST_IN_HANDLER;
      std::lock_guard<std::mutex> lock(mutex_);
      RunsHere here(this);
      noteStatus(statusOf(operation));
      return PROXYCCL_HOST_SUCCESS;
    }
    {
      std::lock_guard<std::mutex> lock(mutex_);
      operations_.push_back(std::move(operation));
      ++queued_;
    }
    changed_.notify_all();
    return PROXYCCL_HOST_SUCCESS;
  }

  int query() {
    std::unique_lock<std::mutex> lock(mutex_, std::defer_lock);
    if (kind_ != PROXYCCL_HOST_IN_CALLER) {
      lock.lock();
    } else if (!lock.try_lock()) {  // another caller's operation is running
      return PROXYCCL_HOST_NOT_READY;
    }
    return completed_ == queued_ ? takeStatus() : PROXYCCL_HOST_NOT_READY;
  }

  int synchronize() {
    uint64_t target = 0;
    int status;
    do {
      status = await(&target, std::chrono::hours(1));
    } while (status == PROXYCCL_HOST_NOT_READY);
    return status;
  }

  // Waits for at most `longest` until *target - 1 operations are done. If *target is 0, sets it so that all operations
  // queued so far must be done.
  int await(uint64_t* target, std::chrono::milliseconds longest) {
    if (kind_ == PROXYCCL_HOST_IN_CALLER && proxyccl_host_is_looking()) return PROXYCCL_HOST_IN_HANDLER;
    std::unique_lock<std::mutex> lock(mutex_, std::defer_lock);
    if (!lockWithin(lock, longest)) return PROXYCCL_HOST_NOT_READY;
    if (*target == 0) *target = queued_ + 1;
    if (!changed_.wait_for(lock, longest, [&] { return completed_ + 1 >= *target; })) return PROXYCCL_HOST_NOT_READY;
    return takeStatus();
  }

 private:
  // Takes the lock. Returns false if another caller's operation holds the lock for longer than `longest`.
  bool lockWithin(std::unique_lock<std::mutex>& lock, std::chrono::milliseconds longest) const {
    if (kind_ != PROXYCCL_HOST_IN_CALLER) {
      lock.lock();
      return true;
    }
    constexpr std::chrono::microseconds kPause(100);
    const auto deadline = std::chrono::steady_clock::now() + longest;
    while (!lock.try_lock()) {
      if (std::chrono::steady_clock::now() > deadline) return false;
      std::this_thread::sleep_for(kPause);
    }
    return true;
  }

  void noteStatus(int status) {
    if (status_ == PROXYCCL_HOST_SUCCESS) status_ = status;
  }
  // Returns the first failure's status once: a failure does not affect later work on the stream.
  int takeStatus() {
    const int status = status_;
    status_ = PROXYCCL_HOST_SUCCESS;
    return status;
  }

  void work() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      changed_.wait(lock, [&] { return stopping_ || !operations_.empty(); });
      if (operations_.empty()) return;
      std::function<int()> operation = std::move(operations_.front());
      operations_.pop_front();
      lock.unlock();
      const int status = statusOf(operation);
      operation = nullptr;
      lock.lock();
      noteStatus(status);
      ++completed_;
      changed_.notify_all();
    }
  }

  const int kind_;
  std::mutex mutex_;  // guards the fields below; held while an operation runs in its caller
  std::condition_variable changed_;
  std::deque<std::function<int()>> operations_;
  uint64_t queued_ = 0, completed_ = 0;
  int status_ = PROXYCCL_HOST_SUCCESS;
  bool stopping_ = false;
  std::thread thread_;
};

class Event {
 public:
  uint64_t begin() {
    std::lock_guard<std::mutex> lock(mutex_);
    pending_.push_back(++recorded_);
    return recorded_;
  }
  // Withdraws a record of begin() that no stream will finish. Waits for the record become waits for the previous one.
  void withdraw(uint64_t record) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (recorded_ == record) --recorded_;
    end(record);
  }
  void finish(uint64_t record) {
    std::lock_guard<std::mutex> lock(mutex_);
    time_ = std::chrono::steady_clock::now();
    end(record);
  }
  int query() {
    std::lock_guard<std::mutex> lock(mutex_);
    return isDone(recorded_) ? PROXYCCL_HOST_SUCCESS : PROXYCCL_HOST_NOT_READY;
  }
  uint64_t lastRecord() {
    std::lock_guard<std::mutex> lock(mutex_);
    return recorded_;
  }
  void waitFor(uint64_t record) {
    std::unique_lock<std::mutex> lock(mutex_);
    host::waitFor(lock, changed_, [&] { return isDone(record); });
  }
  // Waits for at most `longest` for record *target - 1. If *target is 0, sets it to the last record so far.
  int await(uint64_t* target, std::chrono::milliseconds longest) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (*target == 0) *target = recorded_ + 1;
    const bool reached = changed_.wait_for(lock, longest, [&] { return isDone(*target - 1); });
    return reached ? PROXYCCL_HOST_SUCCESS : PROXYCCL_HOST_NOT_READY;
  }
  std::chrono::steady_clock::time_point time() {
    std::lock_guard<std::mutex> lock(mutex_);
    return time_;
  }

 private:
  // Records are tracked separately, because records on several streams end in any order.
  bool isDone(uint64_t record) const {
    return std::find(pending_.begin(), pending_.end(), std::min(record, recorded_)) == pending_.end();
  }
  void end(uint64_t record) {
    pending_.erase(std::remove(pending_.begin(), pending_.end(), record), pending_.end());
    changed_.notify_all();
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  uint64_t recorded_ = 0;
  std::vector<uint64_t> pending_;
  std::chrono::steady_clock::time_point time_{};
};

// The event is shared, because it may be destroyed while a stream still has to record it.
using EventHolder = std::shared_ptr<Event>;

Stream* asStream(void* stream) { return static_cast<Stream*>(stream); }
EventHolder& asEvent(void* event) { return *static_cast<EventHolder*>(event); }

template <class Operation>
int enqueue(void* stream, Operation operation) {
  return statusOf([&] { return asStream(stream)->enqueue(std::move(operation)); });
}

}  // namespace
}  // namespace host
}  // namespace proxyccl

using namespace proxyccl::host;

int proxyccl_host_stream_create(void** stream, int kind) {
  return statusOf([=] {
    *stream = new Stream(kind);
    return PROXYCCL_HOST_SUCCESS;
  });
}
int proxyccl_host_stream_destroy(void* stream) {
  delete asStream(stream);
  return PROXYCCL_HOST_SUCCESS;
}
int proxyccl_host_stream_query(void* stream) { return asStream(stream)->query(); }
int proxyccl_host_stream_synchronize(void* stream) { return asStream(stream)->synchronize(); }
int proxyccl_host_stream_await(void* stream, uint64_t* target, unsigned milliseconds) {
  return asStream(stream)->await(target, std::chrono::milliseconds(milliseconds));
}
int proxyccl_host_stream_wait_event(void* stream, void* event, unsigned) {
  EventHolder holder = asEvent(event);
  const uint64_t record = holder->lastRecord();
  return enqueue(stream, [holder, record] {
    holder->waitFor(record);
    return 0;
  });
}

int proxyccl_host_event_create(void** event) {
  return statusOf([=] {
    *event = new EventHolder(std::make_shared<Event>());
    return PROXYCCL_HOST_SUCCESS;
  });
}
int proxyccl_host_event_destroy(void* event) {
  delete static_cast<EventHolder*>(event);
  return PROXYCCL_HOST_SUCCESS;
}
int proxyccl_host_event_record(void* event, void* stream) {
  EventHolder holder = asEvent(event);
  uint64_t record = 0;
  const int begun = statusOf([&] {
    record = holder->begin();
    return PROXYCCL_HOST_SUCCESS;
  });
  if (begun != PROXYCCL_HOST_SUCCESS) return begun;
  const int status = enqueue(stream, [holder, record] {
    holder->finish(record);
    return 0;
  });
  if (status != PROXYCCL_HOST_SUCCESS) holder->withdraw(record);
  return status;
}
int proxyccl_host_event_query(void* event) { return asEvent(event)->query(); }
int proxyccl_host_event_await(void* event, uint64_t* target, unsigned milliseconds) {
  return asEvent(event)->await(target, std::chrono::milliseconds(milliseconds));
}
int proxyccl_host_event_elapsed(float* milliseconds, void* start, void* end) {
  if (asEvent(start)->query() != PROXYCCL_HOST_SUCCESS || asEvent(end)->query() != PROXYCCL_HOST_SUCCESS)
    return PROXYCCL_HOST_NOT_READY;
  *milliseconds = std::chrono::duration<float, std::milli>(asEvent(end)->time() - asEvent(start)->time()).count();
  return PROXYCCL_HOST_SUCCESS;
}

int proxyccl_host_copy(void* dst, const void* src, size_t bytes, void* stream) {
  return enqueue(stream, [=] {
    proxyccl_memmove(dst, src, bytes);
    return 0;
  });
}
int proxyccl_host_set(void* dst, int value, size_t bytes, void* stream) {
  return enqueue(stream, [=] {
    memset(dst, value, bytes);
    return 0;
  });
}

namespace {
template <class Word>
int enqueueWrite(void* stream, Word* address, Word value) {
  return enqueue(stream, [=] {
    // Release: pairs with the acquire of a thread that waits for the word, which then sees the stream's earlier copies.
    __atomic_store_n(address, value, __ATOMIC_RELEASE);
    return 0;
  });
}
}  // namespace

int proxyccl_host_write64(void* stream, uint64_t* address, uint64_t value, unsigned) {
  return enqueueWrite(stream, address, value);
}
int proxyccl_host_write32(void* stream, uint32_t* address, uint32_t value, unsigned) {
  return enqueueWrite(stream, address, value);
}

namespace {
void carryOut(const ProxycclStreamOperation& operation) {
  auto* word = reinterpret_cast<uint64_t*>(operation.address);
  if (operation.kind == PROXYCCL_STREAM_WRITE) {
    __atomic_store_n(word, operation.value, __ATOMIC_RELEASE);  // a release, which enqueueWrite() explains
    return;
  }
  // Acquire: pairs with the release of the word's writer, whose earlier stores the stream's later work must see.
  for (uint32_t rounds = 0; __atomic_load_n(word, __ATOMIC_ACQUIRE) < operation.value; ++rounds) {
    backOff(rounds);
    if (timeToLook(rounds)) lookAround();
  }
}
}  // namespace

int proxyccl_host_stream_operations(void* stream, unsigned count, ProxycclStreamOperation* operations, unsigned) {
  const bool waits = std::any_of(operations, operations + count,
                                 [](const auto& operation) { return operation.kind == PROXYCCL_STREAM_WAIT; });
  if (waits && !asStream(stream)->mayWait()) return PROXYCCL_HOST_INVALID_VALUE;
  return statusOf([&] {
    std::vector<ProxycclStreamOperation> queued(operations, operations + count);
    return asStream(stream)->enqueue([queued = std::move(queued)] {
      for (const ProxycclStreamOperation& operation : queued) carryOut(operation);
      return 0;
    });
  });
}

int proxyccl_host_module_load(void** module, const char* path) {
  return statusOf([=] {
    auto loaded = std::make_unique<Module>();
    loaded->library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (loaded->library == nullptr) return PROXYCCL_HOST_NOT_FOUND;
    *module = loaded.release();
    return PROXYCCL_HOST_SUCCESS;
  });
}
int proxyccl_host_module_unload(void* module) {
  delete static_cast<Module*>(module);
  return PROXYCCL_HOST_SUCCESS;
}
const char* proxyccl_host_module_error(void) { return dlerror(); }
int proxyccl_host_module_function(void** function, void* module, const char* name) {
  return statusOf([=] {
    auto* from = static_cast<Module*>(module);
    const std::string suffix(name);
    void* entry = dlsym(from->library, ("proxyccl_entry_" + suffix).c_str());
    const void* parameters = dlsym(from->library, ("proxyccl_parameters_" + suffix).c_str());
    if (entry == nullptr || parameters == nullptr) return PROXYCCL_HOST_NOT_FOUND;
    size_t tls_module = 0;  // stays 0 without __shared__ variables
    dlinfo(from->library, RTLD_DI_TLS_MODID, &tls_module);
    const Function found = {reinterpret_cast<void (*)(void**)>(entry), static_cast<const uint32_t*>(parameters),
                            tls_module, from};
    std::lock_guard<std::mutex> lock(from->mutex);
    *function = &from->functions.emplace(suffix, found).first->second;
    return PROXYCCL_HOST_SUCCESS;
  });
}
void* proxyccl_host_module_variable(void* module, const char* name) {
  auto* from = static_cast<Module*>(module);
  if (std::strcmp(name, "proxyccl_default_control") == 0) return &from->default_control;
  return dlsym(from->library, name);
}
const uint32_t* proxyccl_host_function_parameters(void* function) {
  return static_cast<Function*>(function)->parameters;
}

namespace {
struct Arguments {
  std::vector<std::unique_ptr<char[]>> values;
  std::vector<void*> addresses;
};

// Copies the arguments, because the caller may free them before the launch runs.
std::shared_ptr<Arguments> copied(const Function* kernel, void** parameters) {
  auto arguments = std::make_shared<Arguments>();
  const uint32_t count = kernel->parameters[0];
  for (uint32_t i = 0; i < count; ++i) {
    const size_t bytes = kernel->parameters[1 + i] >> 8;
    arguments->values.emplace_back(new char[bytes]);
    memcpy(arguments->values.back().get(), parameters[i], bytes);
    arguments->addresses.push_back(arguments->values.back().get());
  }
  return arguments;
}
}  // namespace

int proxyccl_host_launch(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                         unsigned block_y, unsigned block_z, unsigned shared_bytes, void* stream, void** parameters,
                         void**) {
  const uint64_t threads = static_cast<uint64_t>(block_x) * block_y * block_z;
  const uint64_t blocks = static_cast<uint64_t>(grid_x) * grid_y * grid_z;
  if (threads == 0 || threads > PROXYCCL_HOST_MAX_THREADS_PER_BLOCK || blocks == 0 || blocks > UINT32_MAX ||
      shared_bytes > PROXYCCL_HOST_MAX_SHARED_BYTES || !asStream(stream)->mayWait())
    return PROXYCCL_HOST_INVALID_VALUE;

  const auto* kernel = static_cast<Function*>(function);
  return statusOf([=] {
    const std::shared_ptr<Arguments> arguments = copied(kernel, parameters);
    const Launch launch = {kernel->entry,
                           kernel->tls_module,
                           arguments->addresses.data(),
                           {grid_x, grid_y, grid_z},
                           {block_x, block_y, block_z},
                           shared_bytes,
                           kernel->module->default_control};
    return asStream(stream)->enqueue([launch, arguments] { return runLaunch(launch); });
  });
}
