// Scenarios, whose threads call the shipped device code and the shipped engine. This file adds only the driver's
// actions and the program's accesses to its data.
#include <cstdlib>

#include "scenario.h"

#include "proxyccl/packet.h"
#include "proxyccl/proxy_channel.h"
#include "proxyccl/semaphore.h"
#include "proxyccl/sync.h"

extern "C" {
#include "announcements.h"
#include "calls.h"
#include "copy_transport.h"
#include "transports.h"
#include "worker.h"
}

namespace {

using namespace proxyccl;

constexpr uint64_t kNever = ~0ull;

uint64_t read(const uint64_t& word) { return checked_read(&word, CHECKED_HERE); }
void write(uint64_t& word, uint64_t value) { checked_write(&word, value, CHECKED_HERE); }

template <class T>
void declareAtomic(T& word, T value = 0) {
  word = value;
  checked_atomic(&word, sizeof word);
}
void declareData(uint64_t& word) {
  word = 0;
  checked_data(&word);
}
template <class T>
void declarePrivate(T& object) {
  checked_private(&object, sizeof object);
}

// A control block from which threads only read the time-out.
ProxycclControl quiet;
void declareQuietControl() {
  quiet.timeout_ns = kNever;
  declarePrivate(quiet);
}

// -- a ring and the worker that drains it ---

constexpr uint32_t kMaxSlots = 4;
constexpr uint32_t kMaxChannels = 4;

ProxycclTrigger slots[kMaxSlots];
uint64_t tail, head, tail_cache;
uint32_t refresh_lock;
ProxycclService service;
ProxycclWorker worker;
ProxycclWorkerStats stats;
ProxycclCounters counters[PROXYCCL_MAX_CHANNELS];
uint64_t completed[kMaxChannels];

#ifdef PROXYCCL_WIDE_TRIGGERS
void declareSlot(ProxycclTrigger& slot) { checked_wide(&slot); }
#else
void declareSlot(ProxycclTrigger& slot) {
  checked_atomic(&slot.word0, sizeof slot.word0);
  checked_atomic(&slot.word1, sizeof slot.word1);
}
#endif

ProxycclFifo beginRing(uint32_t size_log2, ProxycclConnection* connection, uint32_t channels) {
  for (uint32_t i = 0; i < 1u << size_log2; ++i) {
    slots[i] = {};
    declareSlot(slots[i]);
  }
  tail_cache = tail = 0;
  checked_growing(&tail, sizeof tail);
  checked_growing(&tail_cache, sizeof tail_cache);
  declareAtomic(head);
  declareAtomic(refresh_lock);
  declareQuietControl();
  declarePrivate(stats);
  declarePrivate(counters);
  service.control = &quiet;
  service.counters = counters;
  worker.service = &service;
  worker.stats = &stats;
  worker.rings[0] = {slots, &tail, size_log2, 0, 0};
  worker.ring_count = worker.connection_count = 1;
  declarePrivate(worker.connection_count);
  worker.connections[0] = connection;
  worker.timed[0].flushed = nullptr;
  connection->progress = {};
  connection->unfinished = nullptr;
  for (uint32_t i = 0; i < channels; ++i) {
    completed[i] = 0;
    checked_growing(&completed[i], sizeof completed[i]);
    service.channels[i] = {};
    service.channels[i].connection = connection;
    service.channels[i].completed = &completed[i];
  }
  return {slots, &tail, &head, &tail_cache, &refresh_lock, size_log2, 0};
}

// Runs the worker until it has taken this many triggers and nothing is outstanding.
void drain(uint64_t triggers) {
  ProxycclExitInfo info;
  for (;;) {
    uint32_t progress = 0;
    int held = 0, outstanding = 0;
    CHECK(proxyccl_worker_visit_ring(&worker, &worker.rings[0], &info, &progress, &held) == CONTINUE);
    CHECK(proxyccl_worker_poll(&worker, &info, &progress, &outstanding) == CONTINUE);
    CHECK(worker.rings[0].next <= triggers);
    if (worker.rings[0].next == triggers && !outstanding) return;
    if (progress == 0) checked_yield(CHECKED_HERE);
  }
}

// -- ring: several producers, each with its own channel and messages ---
//
// The connection reads a put's source immediately, so a producer may overwrite the source after sync().

template <uint32_t Producers, uint32_t Messages, uint32_t SizeLog2>
struct RingScenario {
  static inline ProxycclFifo fifo;
  static inline uint64_t data[Producers][Messages];
  static inline uint32_t taken[Producers];

  static uint64_t contents(uint32_t producer, uint32_t message) { return 100 * (producer + 1) + message; }

  static int put(ProxycclConnection*, const ProxycclMemory*, uint64_t dst_offset, const ProxycclMemory* src,
                 uint64_t src_offset, uint64_t bytes) {
    const uint32_t index = static_cast<uint32_t>(src_offset / sizeof(uint64_t));
    const uint32_t producer = index / Messages, message = index % Messages;
    CHECK(dst_offset == src_offset && bytes == sizeof(uint64_t));  // both words are of one trigger
    CHECK(message == taken[producer]);                             // each producer's messages arrive once, in order
    ++taken[producer];
    CHECK(read(reinterpret_cast<const uint64_t*>(src->base)[index]) == contents(producer, message));
    return 0;
  }
  static int poll(ProxycclConnection*, uint32_t*) { return 0; }
  static int idle(const ProxycclConnection*) { return 1; }

  static void begin() {
    static ProxycclTransport transport;
    static ProxycclConnection connection;
    transport.put = put;
    transport.poll = poll;
    transport.idle = idle;
    connection.transport = &transport;
    fifo = beginRing(SizeLog2, &connection, Producers);
    service.memories[0] = {reinterpret_cast<char*>(data), sizeof data, 0, 0, nullptr};
    for (uint32_t producer = 0; producer < Producers; ++producer) {
      taken[producer] = 0;
      for (uint64_t& word : data[producer]) declareData(word);
    }
  }

  static void run(uint32_t thread) {
    if (thread == Producers) {
      drain(Producers * Messages);
      return;
    }
    const Fifo ring{fifo};
    uint64_t ticket = kNoTicket;
    for (uint32_t message = 0; message < Messages; ++message) {
      write(data[thread][message], contents(thread, message));
      const uint64_t offset = (thread * Messages + message) * sizeof(uint64_t);
      ticket = ring.push(makeTrigger(PROXYCCL_OP_DATA, thread, 0, offset, 0, offset, sizeof(uint64_t)), &quiet);
      CHECK(ticket != kNoTicket);
    }
    CHECK(ring.sync(ticket, &quiet));
    for (uint64_t& word : data[thread]) write(word, 0);
  }
};

// -- channel: a kernel puts, signals and flushes; the peer waits for the signal and reads ---

// A driver's stream, whose work a separate thread executes in order.
struct Stream {
  struct Operation {
    void* destination;
    const void* source;  // null if the operation stores `value`
    uint64_t value;
  };
  Operation operations[16];
  uint64_t issued, executed, closed, recorded;

  void begin() {
    declareAtomic(issued);
    declareAtomic(executed);
    declareAtomic(closed);
    recorded = 0;
  }
  int issue(Operation operation) {
    const uint64_t count = __atomic_load_n(&issued, __ATOMIC_RELAXED);
    CHECK(count < sizeof operations / sizeof operations[0]);
    operations[count] = operation;
    __atomic_store_n(&issued, count + 1, __ATOMIC_RELEASE);
    return 0;
  }
  void run() {
    for (uint64_t count = 0;;) {
      // `closed` is read before `issued`, because nothing is issued after closing.
      const uint64_t ended = __atomic_load_n(&closed, __ATOMIC_ACQUIRE);
      if (count == __atomic_load_n(&issued, __ATOMIC_ACQUIRE)) {
        if (ended) return;
        checked_yield(CHECKED_HERE);
        continue;
      }
      const Operation& operation = operations[count];
      if (operation.source != nullptr)
        checked_copy(operation.destination, operation.source, operation.value, CHECKED_HERE);
      else
        __atomic_store_n(static_cast<uint64_t*>(operation.destination), operation.value, __ATOMIC_RELEASE);
      __atomic_store_n(&executed, ++count, __ATOMIC_RELEASE);
    }
  }

  static Stream& of(void* stream) { return *static_cast<Stream*>(stream); }
  static int copy(void* to, const void* from, size_t bytes, void* stream) {
    return of(stream).issue({to, from, bytes});
  }
  static int write64(void* stream, uint64_t* address, uint64_t value, unsigned) {
    return of(stream).issue({address, nullptr, value});
  }
  static int record(void*, void* stream) {
    of(stream).recorded = __atomic_load_n(&of(stream).issued, __ATOMIC_RELAXED);
    return PROXYCCL_RUNTIME_SUCCESS;
  }
  static int query(void* stream) {
    const uint64_t executed = __atomic_load_n(&of(stream).executed, __ATOMIC_ACQUIRE);
    return executed >= of(stream).recorded ? PROXYCCL_RUNTIME_SUCCESS : PROXYCCL_RUNTIME_NOT_READY;
  }
};

// If WithStream, the driver makes the copies, else the engine. If ByTicket, the kernel waits for its puts' tickets,
// else it flushes.
template <bool WithStream, bool ByTicket = false>
struct ChannelScenario {
  static constexpr uint64_t kRounds = 2;
  enum Thread { kKernel, kEngine, kPeer, kStream };

  static inline Stream stream;
  static inline ProxycclProxyChannel handle;
  static inline uint64_t source, destination[kRounds], flushed, inbound, expected[2];

  static void begin() {
    static ProxycclConnection* connection;
    static const ProxycclRuntimeTable runtime = {Stream::copy, Stream::write64, nullptr, Stream::record, Stream::query};
    static const ProxycclCopyOptions options = {&stream, &stream};
    std::free(connection);  // all that a copy connection owns; the transport has no `destroy`
    const char* refused;
    connection = proxyccl_copy_transport.create(&options, &runtime, &refused);
    const ProxycclFifo fifo = beginRing(1, connection, 1);
    if (WithStream) stream.begin();
    for (uint64_t& word : destination) declareData(word);
    declareData(source);
    flushed = inbound = expected[0] = expected[1] = 0;
    checked_growing(&flushed, sizeof flushed);
    checked_growing(&inbound, sizeof inbound);
    declarePrivate(expected);
    char* const from = reinterpret_cast<char*>(&source);
    char* const to = reinterpret_cast<char*>(destination);
    service.memories[0] = {from, sizeof source, 0, 0, WithStream ? nullptr : from};
    service.memories[1] = {to, sizeof destination, 0, 0, WithStream ? nullptr : to};
    service.channels[0].remote_semaphore = &inbound;
    service.channels[0].flushed = &flushed;
    handle = {fifo, {&inbound, expected, nullptr, nullptr}, &flushed, completed, nullptr, &quiet, 0, 0, 1, 0};
  }

  static void run(uint32_t thread) {
    const ProxyChannelDeviceHandle channel{handle};
    if (thread == kKernel) {
      for (uint64_t round = 0; round < kRounds; ++round) {
        write(source, round + 1);
        const uint64_t offset = round * sizeof(uint64_t);
        if (ByTicket) {
          CHECK(channel.waitComplete(channel.putWithSignal(offset, 0, sizeof(uint64_t))));
        } else if (round % 2 == 0) {
          channel.putWithSignal(offset, 0, sizeof(uint64_t));
          CHECK(channel.flush());
        } else {
          CHECK(channel.putWithSignalAndFlush(offset, 0, sizeof(uint64_t)));
        }
      }
      write(source, 0);
    } else if (thread == kEngine) {
      drain(ByTicket ? kRounds : kRounds / 2 * 3);
      if (WithStream) __atomic_store_n(&stream.closed, 1, __ATOMIC_RELEASE);
    } else if (thread == kPeer) {
      for (uint64_t round = 0; round < kRounds; ++round) {
        CHECK(channel.wait());
        CHECK(read(destination[round]) == round + 1);
      }
    } else {
      stream.run();
    }
  }
};

// -- semaphores: two ranks alternately write each other's memory ---

struct SemaphoreScenario {
  static constexpr uint64_t kRounds = 3;

  struct Side {
    uint64_t inbound, expected, outbound, received;
  };
  static inline Side sides[2];

  static void begin() {
    declareQuietControl();
    for (Side& side : sides) {
      side = {};
      checked_growing(&side.inbound, sizeof side.inbound);
      declareData(side.received);
      declarePrivate(side.expected);
    }
  }

  static void run(uint32_t thread) {
    Side& own = sides[thread];
    Side& peer = sides[1 - thread];
    const Semaphore semaphore{{&own.inbound, &own.expected, &peer.inbound, &own.outbound, 0}};
    for (uint64_t round = 1; round <= kRounds; ++round) {
      if (thread == 1) {
        CHECK(semaphore.wait(&quiet, PROXYCCL_WAIT_SM_SIGNAL, 0, 0));
        CHECK(read(own.received) == round);
      }
      write(peer.received, round);
      semaphore.signal();
      if (thread == 0) {
        CHECK(semaphore.wait(&quiet, PROXYCCL_WAIT_SM_SIGNAL, 1, 0));
        CHECK(read(own.received) == round);
      }
    }
  }
};

// Two threads of one rank signal a channel concurrently. The peer waits for both signals, then reads both threads'
// data.
struct SharedSemaphoreScenario {
  static inline uint64_t inbound, expected, outbound, received[2];

  static void begin() {
    declareQuietControl();
    inbound = expected = outbound = 0;
    declareAtomic(inbound);
    declareAtomic(expected);
    declareAtomic(outbound);
    for (uint64_t& each : received) declareData(each);
  }

  static void run(uint32_t thread) {
    const SharedSemaphore semaphore{{&inbound, &expected, &inbound, &outbound, 1}};
    if (thread < 2) {
      write(received[thread], 1);
      semaphore.signal();
      return;
    }
    CHECK(semaphore.wait(&quiet, PROXYCCL_WAIT_SM_SIGNAL, 0, 0));
    while (!semaphore.poll()) {}
    for (uint64_t& each : received) CHECK(read(each) == 1);
  }
};

// -- grid barrier: all blocks read each block's data after the barrier, and rewrite it after the next one ---

struct GridScenario {
  static constexpr uint32_t kBlocks = 3, kRounds = 2;

  static inline DeviceSyncer syncer;
  static inline uint64_t written[kBlocks];

  static void begin() {
    declareQuietControl();
    declareAtomic(syncer.arrived);
    declareAtomic(syncer.generation);
    for (uint64_t& word : written) declareData(word);
  }

  static void run(uint32_t block) {
    for (uint64_t round = 1; round <= kRounds; ++round) {
      write(written[block], round);
      CHECK(syncer.sync(kBlocks, &quiet));
      for (const uint64_t& word : written) CHECK(read(word) == round);
      CHECK(syncer.sync(kBlocks, &quiet));
    }
  }
};

// -- packets: two ranks repeatedly send each other one packet, in the same memory ---

template <class Packet>
struct PacketScenario {
  static constexpr uint32_t kFlags = 3;

  static inline Packet packets[2];

  static void begin() {
    declareQuietControl();
    for (Packet& packet : packets) {
      packet = {};
      for (size_t i = 0; i < sizeof packet; i += sizeof(uint64_t))
        checked_atomic(reinterpret_cast<char*>(&packet) + i, sizeof(uint64_t));
    }
  }

  static LL16Packet::Payload payload(LL16Packet*, uint32_t flag) { return {10 * flag, 10 * flag + 1}; }
  static LL8Packet::Payload payload(LL8Packet*, uint32_t flag) { return 10 * flag; }
  static bool same(LL16Packet::Payload a, LL16Packet::Payload b) { return a.x == b.x && a.y == b.y; }
  static bool same(LL8Packet::Payload a, LL8Packet::Payload b) { return a == b; }

  static void run(uint32_t thread) {
    Packet* const own = &packets[thread];
    for (uint32_t flag = 1; flag <= kFlags; ++flag) {
      if (thread == 0) packets[1].write(payload(own, flag), flag);
      CHECK(same(readPacket(own, flag, &quiet), payload(own, flag)));
      if (thread == 1) packets[0].write(payload(own, flag), flag);
    }
  }
};

// -- failures ---

void declareRecord(ProxycclErrorRecord& record) {
  checked_atomic(&record.state, sizeof record.state);
  checked_atomic(&record.code, sizeof record.code);
  checked_atomic(&record.rank, sizeof record.rank);
  checked_atomic(&record.expected, sizeof record.expected);
}

// Rank 0 fails. A kernel of rank 1 stops waiting for rank 0, continues with incomplete data and signals rank 2, so rank
// 2's wait may succeed. After its kernel, rank 2's CPU must find which rank failed, and why.
struct AbortScenario {
  static constexpr uint32_t kRanks = 3;
  static constexpr uint64_t kExpected = 7;

  static inline ProxycclControl controls[kRanks];
  static inline ProxycclControl* peers[kRanks][kRanks - 1];
  static inline uint64_t inbound[kRanks], expected[kRanks][2], outbound[kRanks];

  static void begin() {
    for (uint32_t rank = 0; rank < kRanks; ++rank) {
      ProxycclControl& control = controls[rank];
      control = {};
      control.rank = rank;
      control.timeout_ns = kNever;
      control.peers = peers[rank];
      control.peer_count = kRanks - 1;
      for (uint32_t i = 0; i < kRanks - 1; ++i) peers[rank][i] = &controls[i < rank ? i : i + 1];
      checked_atomic(&control.abort, sizeof control.abort);
      checked_atomic(&control.failed_rank, sizeof control.failed_rank);
      declareRecord(control.error);
      declarePrivate(control);
      expected[rank][0] = expected[rank][1] = outbound[rank] = 0;
      declareAtomic(inbound[rank]);
    }
    declarePrivate(expected);
  }

  static void run(uint32_t rank) {
    Control* const control = &controls[rank];
    const uint32_t next = (rank + 1) % kRanks;
    const Semaphore semaphore{{&inbound[rank], expected[rank], &inbound[next], &outbound[rank], 0}};
    if (rank == 0) {
      recordError(control, PROXYCCL_ERROR_TIMEOUT, {PROXYCCL_WAIT_SM_SIGNAL, 2, 0, kExpected}, 0);
      return;
    }
    const bool came = semaphore.wait(control, PROXYCCL_WAIT_SM_SIGNAL, rank - 1, 0);
    if (rank == 1) {
      CHECK(!came);
      semaphore.signal();
      return;
    }
    CHECK(loadAcquireSystem(&control->failed_rank) == 1);
    const ProxycclErrorRecord& record = controls[0].error;
    CHECK(loadAcquireSystem(&record.state) == PROXYCCL_RECORD_VALID);
    CHECK(loadRelaxedSystem(&record.code) == PROXYCCL_ERROR_TIMEOUT);
    CHECK(loadRelaxedSystem(&record.expected) == kExpected);
  }
};

// A rank's CPU that learns of another rank's failure, before any wait is stopped, must find the failure's record.
struct NameScenario {
  static constexpr uint64_t kExpected = 7;

  static inline ProxycclControl failing, told;
  static inline ProxycclControl* const peers[] = {&told};

  static void begin() {
    failing = told = {};
    failing.rank = 4;
    failing.peers = peers;
    failing.peer_count = 1;
    declareRecord(failing.error);
    checked_atomic(&told.failed_rank, sizeof told.failed_rank);
    declarePrivate(failing);
    declarePrivate(told);
  }

  static void run(uint32_t thread) {
    if (thread == 0) {
      recordError(&failing, PROXYCCL_ERROR_TIMEOUT, {PROXYCCL_WAIT_SM_SIGNAL, 2, 0, kExpected}, 0);
      return;
    }
    while (loadAcquireSystem(&told.failed_rank) == 0) checked_yield(CHECKED_HERE);
    CHECK(loadAcquireSystem(&told.failed_rank) == failing.rank + 1);
    CHECK(loadAcquireSystem(&failing.error.state) == PROXYCCL_RECORD_VALID);
    CHECK(loadRelaxedSystem(&failing.error.expected) == kExpected);
  }
};

// Two threads of a rank fail concurrently. The record that the rank's CPU reads must be one thread's, not a mixture.
struct RecordScenario {
  static inline ProxycclControl control;

  static void begin() {
    control = {};
    declareRecord(control.error);
    checked_atomic(&control.abort, sizeof control.abort);
    declarePrivate(control);
  }

  static void run(uint32_t thread) {
    if (thread < 2) {
      recordError(&control, PROXYCCL_ERROR_TIMEOUT + thread, {PROXYCCL_WAIT_FLUSH, PROXYCCL_NO_PEER, 0, thread}, 0);
      return;
    }
    while (loadAcquireSystem(&control.error.state) != PROXYCCL_RECORD_VALID) checked_yield(CHECKED_HERE);
    CHECK(loadRelaxedSystem(&control.error.code) ==
          PROXYCCL_ERROR_TIMEOUT + loadRelaxedSystem(&control.error.expected));
  }
};

// A CPU asks a kernel for its wait, reads the answer, and then ends the wait.
struct QuestionScenario {
  static constexpr uint32_t kQuestion = 5, kPeer = 1;

  static inline ProxycclControl control;
  static inline uint64_t inbound, expected[2];

  static void begin() {
    control = {};
    control.timeout_ns = kNever;
    ProxycclWait& wait = control.waits[kPeer];
    checked_atomic(&wait.answered, sizeof wait.answered);
    checked_atomic(&wait.kind, sizeof wait.kind);
    checked_atomic(&wait.expected, sizeof wait.expected);
    checked_atomic(&control.asked, sizeof control.asked);
    declarePrivate(control);
    expected[0] = expected[1] = 0;
    declarePrivate(expected);
    declareAtomic(inbound);
  }

  static void run(uint32_t thread) {
    if (thread == 0) {
      const Semaphore semaphore{{&inbound, expected, nullptr, nullptr, 0}};
      CHECK(semaphore.wait(&control, PROXYCCL_WAIT_PROXY_SIGNAL, kPeer, 0));
      return;
    }
    storeRelaxedSystem(&control.asked, kQuestion);
    const ProxycclWait& wait = control.waits[kPeer];
    while (loadAcquireSystem(&wait.answered) != kQuestion) checked_yield(CHECKED_HERE);
    CHECK(loadRelaxedSystem(&wait.kind) == PROXYCCL_WAIT_PROXY_SIGNAL);
    CHECK(loadRelaxedSystem(&wait.expected) == 1);
    storeReleaseSystem<uint64_t>(&inbound, 1);
  }
};

// -- announcements: a rank announces memory and later replaces it by other memory; a peer maps the announced memory and
// replies ---

struct AnnouncementScenario {
  static constexpr uint32_t kBytes = 2;

  static inline ProxycclAnnouncements table;
  static inline uint64_t mapped;

  static void begin() {
    ProxycclAnnouncement& entry = table.entries[0];
    ProxycclAnnouncementReply& reply = table.replies[0][0];
    entry = {};
    reply = {};
    checked_atomic(&entry.version, sizeof entry.version);
    checked_atomic(&entry.handle_bytes, sizeof entry.handle_bytes);
    checked_atomic(&entry.for_proxies, sizeof entry.for_proxies);
    for (uint32_t i = 0; i < kBytes; ++i) checked_atomic(&entry.handle[i], sizeof entry.handle[i]);
    checked_atomic(&reply.version, sizeof reply.version);
    checked_atomic(&reply.address, sizeof reply.address);
    declareAtomic<uint64_t>(table.changes);
    declareData(mapped);
  }

  static void run(uint32_t thread) {
    if (thread == 0) {
      proxyccl_announce(&table, 0, "aa", kBytes);
      proxyccl_announce(&table, 0, "bb", kBytes);
      uint64_t address;
      while (!proxyccl_announcement_reached(&table, 0, 0, &address)) checked_yield(CHECKED_HERE);
      CHECK(address == 40);
      CHECK(read(mapped) == 4);
      return;
    }
    for (uint32_t version = 0; version != 4;) {
      const uint64_t changes = proxyccl_announcement_changes(&table);
      ProxycclAnnouncement copy;
      version = proxyccl_announcement_read(&table, 0, &copy);
      CHECK(changes < 2 || version == 4);
      if (version != 4) checked_yield(CHECKED_HERE);
      if (version == 0) continue;
      const char written = version == 2 ? 'a' : 'b';
      CHECK(copy.handle_bytes == kBytes && copy.handle[0] == written && copy.handle[1] == written);
      write(mapped, version);
      proxyccl_announcement_reply(&table, 0, 0, version, 10 * version);
    }
  }
};

// -- calls: each of two ranks logs its call, and compares the call with the other rank's call if the log has one ---

struct CallScenario {
  static constexpr uint32_t kEntry = 1;  // the log's entry for the first call

  static inline ProxycclControl controls[2];
  static inline ProxycclCallEntry logs[2][PROXYCCL_CALL_LOG_ENTRIES];
  static inline ProxycclCallCount counts[2][PROXYCCL_CALL_KINDS + 1];
  static inline const ProxycclCallEntry* peers[2][1];
  static inline ProxycclCallers callers[2];
  static inline uint64_t differs[2];

  static void begin() {
    for (uint32_t rank = 0; rank < 2; ++rank) {
      declareAtomic(controls[rank].abort);
      ProxycclCallEntry& entry = logs[rank][kEntry];
      entry = {};
      checked_atomic(&entry.stamp, sizeof entry.stamp);
      for (uint64_t& field : entry.call.fields) checked_atomic(&field, sizeof field);
      peers[rank][0] = logs[1 - rank];
      callers[rank] = {};
      callers[rank].control = &controls[rank];
      callers[rank].own = logs[rank];
      callers[rank].counts = counts[rank];
      callers[rank].peers = peers[rank];
      callers[rank].peer_count = 1;
      declareAtomic(differs[rank]);
    }
  }

  static void run(uint32_t thread) {
    ProxycclCall call = {};
    call.fields[0] = 1 + thread;
    const int status = proxyccl_calls_agree(&callers[thread], &call);
    CHECK(status == 0 || status == PROXYCCL_CALL_DIFFERS);
    if (status != 0) CHECK(callers[thread].different.fields[0] == 2 - thread);
    // At least one rank must find the other's call, else both would launch and wait for each other.
    storeRelaxedSystem<uint64_t>(&differs[thread], status == 0 ? 1 : 2);
    if (thread == 1) return;
    uint64_t other;
    while ((other = loadRelaxedSystem(&differs[1])) == 0) checked_yield(CHECKED_HERE);
    CHECK(status != 0 || other == 2);
  }
};

// -- overwritten calls: one rank is a lap of the log ahead, so its later call overwrites the call that the other rank
// compares ---

struct OverwrittenCallScenario : CallScenario {
  static void run(uint32_t thread) {
    ProxycclCall call = {};
    for (uint64_t& field : call.fields) field = 1;
    // the first calls are equal, or the entry was overwritten
    CHECK(proxyccl_calls_agree(&callers[thread], &call) == 0);
    if (thread == 1) return;
    callers[0].sequence = kEntry + PROXYCCL_CALL_LOG_ENTRIES - 1;
    for (uint64_t& field : call.fields) field = 2;
    CHECK(proxyccl_calls_agree(&callers[0], &call) == 0);
  }
};

}  // namespace

#define SCENARIO(name, threads, ...) {name, threads, __VA_ARGS__::begin, __VA_ARGS__::run}

const Scenario kScenarios[] = {
    SCENARIO("ring_of_2_with_2_producers", 3, RingScenario<2, 2, 1>),
    SCENARIO("ring_of_2_with_2_producers_and_3_laps", 3, RingScenario<2, 3, 1>),
    SCENARIO("ring_of_2_with_3_producers", 4, RingScenario<3, 2, 1>),
    SCENARIO("ring_of_4_with_3_producers", 4, RingScenario<3, 4, 2>),
    SCENARIO("channel_by_the_cpu", 3, ChannelScenario<false>),
    SCENARIO("channel_by_a_stream", 4, ChannelScenario<true>),
    SCENARIO("tickets_by_the_cpu", 3, ChannelScenario<false, true>),
    SCENARIO("tickets_by_a_stream", 4, ChannelScenario<true, true>),
    SCENARIO("semaphores", 2, SemaphoreScenario),
    SCENARIO("shared_semaphores", 3, SharedSemaphoreScenario),
    SCENARIO("grid", 3, GridScenario),
    SCENARIO("packets_of_16_bytes", 2, PacketScenario<LL16Packet>),
    SCENARIO("packets_of_8_bytes", 2, PacketScenario<LL8Packet>),
    SCENARIO("abort", 3, AbortScenario),
    SCENARIO("failed_rank", 2, NameScenario),
    SCENARIO("record", 3, RecordScenario),
    SCENARIO("question", 2, QuestionScenario),
    SCENARIO("announcements", 2, AnnouncementScenario),
    SCENARIO("calls", 2, CallScenario),
    SCENARIO("overwritten_calls", 2, OverwrittenCallScenario),
};
const unsigned kScenarioCount = sizeof kScenarios / sizeof kScenarios[0];
