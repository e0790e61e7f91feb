/* The engine of transfers between agents, which come and go and name memory by its address.
 *
 * An agent has one thread, which sleeps until a socket or a caller has work for it. A link is a socket from one agent
 * to another: the side that opened it requests, the other side serves. A transfer is a list of blocks over one link, or
 * within the agent. Its path is decided when the link is made: process_vm_readv and process_vm_writev into the peer's
 * process, or the socket itself. Memory of devices is copied by a device to which both sides are mapped.
 *
 * Every function may be called from any thread at any time. None waits for a peer; proxyccl_transfer_wait and
 * proxyccl_agent_wait are bounded.
 */
#ifndef PROXYCCL_TRANSFERS_H
#define PROXYCCL_TRANSFERS_H

#include <stdint.h>

enum { PROXYCCL_LEDGER_WORDS = 1 << 20 };
enum { PROXYCCL_SECRET_BYTES = 16, PROXYCCL_LONGEST_MESSAGE = 1 << 28, PROXYCCL_MOST_UNSENT = 1 << 29 };

typedef struct ProxycclAgent ProxycclAgent;
typedef struct ProxycclLink ProxycclLink;
typedef struct ProxycclTransfer ProxycclTransfer;

typedef enum ProxycclTransferState {
  PROXYCCL_TRANSFER_NEW,      /* never posted */
  PROXYCCL_TRANSFER_ACTIVE,   /* posted, not ended */
  PROXYCCL_TRANSFER_DONE,     /* the data is where it belongs */
  PROXYCCL_TRANSFER_CANCELED, /* by this side */
  PROXYCCL_TRANSFER_LOST,     /* the link ended */
  PROXYCCL_TRANSFER_REFUSED,  /* the peer has not registered a block: proxyccl_transfer_fault */
  PROXYCCL_TRANSFER_FAILED    /* a copy failed: proxyccl_transfer_error, proxyccl_transfer_fault */
} ProxycclTransferState;

/* Why memory of a transfer could not be reached. */
typedef enum ProxycclFaultKind {
  PROXYCCL_FAULT_NONE,         /* it could, or the reason is not known */
  PROXYCCL_FAULT_DEREGISTERED, /* the peer deregistered it */
  PROXYCCL_FAULT_FREED,        /* it is not mapped in the peer's process, which has not deregistered it */
  PROXYCCL_FAULT_FREED_HERE,   /* it is not mapped in this process */
  PROXYCCL_FAULT_PROTECTED,    /* it is mapped in both */
  PROXYCCL_FAULT_ENDED_HERE    /* this agent deregistered it */
} ProxycclFaultKind;

typedef struct ProxycclFault {
  ProxycclFaultKind kind;
  uint64_t address; /* of the first byte, in the process of that side */
} ProxycclFault;

/* CLOCK_MONOTONIC, in ns. */
typedef struct ProxycclTransferTimes {
  uint64_t posted;   /* when the last post began */
  uint64_t returned; /* when it returned */
  uint64_t ended;
} ProxycclTransferTimes;

/* An agent's record of each transfer that ends while somebody traces, in memory that other processes map. Only its
 * own process writes the records and `count`, and others `until`. */
enum { PROXYCCL_TRANSFER_RECORDS = 4096 };
typedef struct ProxycclTransferRecord {
  uint64_t posted, ended, bytes, blocks;
  uint32_t label; /* of proxyccl_transfer_set_label */
  uint16_t writes, state;
} ProxycclTransferRecord;
typedef struct ProxycclTransferLog {
  uint64_t until; /* transfers that end later are not noted */
  uint64_t count; /* of records so far; number i is at i % PROXYCCL_TRANSFER_RECORDS */
  ProxycclTransferRecord records[4096];
} ProxycclTransferLog;

/* A device that copies: addresses of the driver's calls (runtime_table.h, memory_pool.h); 0: it has no such call. */
typedef struct ProxycclCopier {
  uint64_t copy, write64, event_record, event_query;
  uint64_t current, make_current, context; /* of threads that use the device */
  uint64_t exchange_capture_mode;
  int32_t relaxed; /* the capture mode that allows these calls */
} ProxycclCopier;

/* The copies of a device, and the queue for them. Everything that this names outlives the transfer. */
typedef struct ProxycclDeviceCopies {
  const uint64_t *rows; /* (to, from, bytes) of each copy by the copy engine: the device's addresses */
  uint64_t count;
  uint64_t launch;               /* a ProxycclLaunch that copies the rest, or 0 */
  uint64_t blocks, bytes;        /* of all */
  uint64_t stream;               /* the one for starts without a stream */
  uint64_t event;                /* one that was never recorded: asking for it tells whether the device has failed */
  uint64_t word, word_on_device; /* a pinned word of the transfer's own, by its two addresses */
} ProxycclDeviceCopies;

enum { PROXYCCL_STAGES = 4, PROXYCCL_STAGE_BYTES = 1 << 19 };

/* Pinned memory by way of which a device's memory is copied from and to another process: each stage is
 * PROXYCCL_STAGE_BYTES, at an address that the device and the CPU share, with an event and, for copies from the device,
 * a stream of its own; copies to the device are all on the first. The last stream and event are for memory that is not
 * pinned. */
typedef struct ProxycclStaging {
  const ProxycclCopier *copier;
  uint64_t memory[PROXYCCL_STAGES]; /* one after another */
  int32_t by_fabric;                /* registered with the agent's endpoint of libfabric: */
  uint64_t descriptor, key, base;   /* the local descriptor, the key, and the first byte's address for requests */
  uint64_t streams[PROXYCCL_STAGES + 1], events[PROXYCCL_STAGES + 1];
} ProxycclStaging;

/* Makes an agent and its thread. It takes the listening sockets over, also when it fails. `secret`: the bytes that a
 * peer must know. `copied`: whether a peer of this host may have itself permitted to copy from and to this process, see
 * proxyccl_ask_to_copy. NULL with errno. */
ProxycclAgent *proxyccl_agent_create(const char *name, const char *secret, int copied, const int *listeners,
                                     uint32_t count);
/* Ends its thread, its links and their transfers. Everything but release is still allowed, and refused or without
 * effect. */
void proxyccl_agent_stop(ProxycclAgent *agent);
/* Gives the handle back. The agent is freed with the last of its handle, its links and its transfers. */
void proxyccl_agent_release(ProxycclAgent *agent);
/* In a fork's child: closes the copies of its descriptors, so that peers notice the parent's end. */
void proxyccl_agent_forget(ProxycclAgent *agent);
/* Lets it note transfers until it is stopped. */
void proxyccl_agent_set_log(ProxycclAgent *agent, ProxycclTransferLog *log);
/* Copies the records from number `next` on that are still there, at most `room`. Sets `next` to the number after the
 * last one, and `lost` to the number of those that were overwritten. Returns their number. */
uint32_t proxyccl_transfer_log_read(const ProxycclTransferLog *log, uint64_t *next, ProxycclTransferRecord *records,
                                    uint32_t room, uint64_t *lost);
/* Has an eventfd, which outlives the agent's links, raised when a link that this agent opened is lost. */
void proxyccl_agent_tell_losses(ProxycclAgent *agent, int event);
/* Where its secret lies in this process: what a peer of this host reads to find out that it reaches this memory. */
uint64_t proxyccl_agent_secret(const ProxycclAgent *agent);
/* Replaces the ranges that peers may reach through sockets. `ranges`: `count` first addresses, in order, then for each
 * the highest end of the ranges up to it. `staging`: of the device whose memory it is, which it names from its first
 * call on, and outlives the agent's thread; NULL: the host's. When it returns, no socket touches other memory: it waits
 * for the device's copies from and to such memory, at most 30 s. 0 or ENOMEM. */
int proxyccl_agent_set_memory(ProxycclAgent *agent, const ProxycclStaging *staging, const uint64_t *ranges,
                              uint64_t count);
/* Bytes in the inbox: for each message the lengths of the sender's name and of the message (8 bytes each), then both.
 */
uint64_t proxyccl_agent_unread(const ProxycclAgent *agent);
/* Moves whole messages to `to` and returns their bytes: as many as fit. */
uint64_t proxyccl_agent_take(ProxycclAgent *agent, char *to, uint64_t room);
/* Waits until the inbox has a message, or the agent is stopped. 1: it has one. */
int proxyccl_agent_wait(ProxycclAgent *agent, uint64_t timeout_ns);
/* Puts a message into its own inbox. 0, EMSGSIZE or ENOMEM. */
int proxyccl_agent_tell_itself(ProxycclAgent *agent, const char *message, uint64_t bytes);

/* Reads a word of another process: how a caller finds out whether process_vm_readv works, and for the process that it
 * means. 0 or an errno. */
int proxyccl_process_read(int32_t pid, uint64_t address, char *to, uint64_t bytes);

/* Asks the agent at the other end of a connected Unix socket to let this process copy from and to its process, where
 * Yama restricts that to parents. The socket serves nothing else: its answer may come late. 0 or an errno, ETIMEDOUT
 * after the time. */
int proxyccl_ask_to_copy(int socket, const char *secret, int timeout_ms);

/* An agent's ledger: PROXYCCL_LEDGER_WORDS words in memory that its peers of the host map. The word of a registration,
 * number % PROXYCCL_LEDGER_WORDS, is the number while the memory is registered, and its complement if the memory was
 * freed first. Word 0 counts the ends of registrations. No number is used twice. */
void proxyccl_ledger_begin(uint64_t *ledger, uint64_t number);
/* Ends a registration, unless it has ended; `freed`: because its memory is no longer mapped. Any thread may call it. */
void proxyccl_ledger_end(uint64_t *ledger, uint64_t number, int freed);
uint64_t proxyccl_ledger_count(const uint64_t *ledger);

/* Makes a link of a connected stream socket, which it takes over, also when it fails. `peer_secret`: of the agent that
 * it leads to. `process`: a pidfd of the peer, taken over too, or -1. `pid`: the peer's process if process_vm_readv
 * works for it, else 0. `address`: of this agent's endpoint of libfabric, which the peer will use; of 0 bytes: it will
 * not. NULL with errno. */
ProxycclLink *proxyccl_link_create(ProxycclAgent *agent, int socket, const char *peer_secret, int process, int32_t pid,
                                   const char *address, uint64_t address_bytes);
/* Ends it, and its active transfers as lost. */
void proxyccl_link_end(ProxycclLink *link);
/* Ends it, and gives the handle back. */
void proxyccl_link_release(ProxycclLink *link);
/* Why nothing moves over it (static text), or NULL. */
const char *proxyccl_link_lost(const ProxycclLink *link);
/* The same, after a look whether the peer has gone, of which nobody may have heard yet. */
const char *proxyccl_link_look(ProxycclLink *link);
/* Sends a message. It arrives after those before it. 0, ENOTCONN, EMSGSIZE, ENOBUFS if the peer takes none for long,
 * or ENOMEM. */
int proxyccl_link_tell(ProxycclLink *link, const char *message, uint64_t bytes);

/* `count` blocks, none of them empty: arrays of (address, bytes), of equal bytes at each index, which outlive the
 * transfer. */
typedef struct ProxycclBlocks {
  int32_t writes; /* to the remote ones */
  const uint64_t *local, *remote;
  uint64_t count;
} ProxycclBlocks;

/* The functions that make a transfer, one for each path. `link`: NULL within the agent. NULL with errno.
 *
 * This one is copied by threads. `pid`: the process that the kernel copies from and to; 0: the CPU copies, between
 * addresses of this process. `staging`: its own, if the local blocks are a device's; otherwise NULL. */
ProxycclTransfer *proxyccl_transfer_create(ProxycclAgent *agent, ProxycclLink *link, const ProxycclBlocks *blocks,
                                           const ProxycclStaging *staging, int32_t pid);
/* One by the link's socket. */
ProxycclTransfer *proxyccl_transfer_create_by_socket(ProxycclAgent *agent, ProxycclLink *link,
                                                     const ProxycclBlocks *blocks);
/* One between a device and the link, by way of stages, its own, which outlive it. `by_fabric`: the peer's endpoint of
 * libfabric reads and writes the stages; otherwise the link's socket carries them. */
ProxycclTransfer *proxyccl_transfer_create_staged(ProxycclAgent *agent, ProxycclLink *link,
                                                  const ProxycclBlocks *blocks, const ProxycclStaging *staging,
                                                  int by_fabric);
/* An endpoint of libfabric, by which transfers read and write registered memory of peers. */
typedef struct ProxycclFabricPort {
  uint64_t endpoint, queue, fabric, peers; /* fid_ep *, fid_cq *, fid_fabric *, fid_av * */
  int32_t descriptor;                      /* readable when the queue has something; -1: none */
  uint32_t depth;                          /* most requests outstanding */
  uint64_t max_message;                    /* bytes that one request may carry */
} ProxycclFabricPort;
/* Gives an agent an endpoint, which outlives its thread. 0, ENOMEM, or ENOSYS in a build without libfabric. */
int proxyccl_agent_set_fabric(ProxycclAgent *agent, const ProxycclFabricPort *port);
/* One by the agent's endpoint. `rows`: `count` of (local address, the peer's for requests, bytes, local
 * descriptor, the peer's key, the peer's address), which outlive it. `peer`: an fi_addr_t. */
ProxycclTransfer *proxyccl_transfer_create_by_fabric(ProxycclAgent *agent, ProxycclLink *link, int writes,
                                                     const uint64_t *rows, uint64_t count, uint64_t peer);
/* One that a device copies. `copier` outlives it. */
ProxycclTransfer *proxyccl_transfer_create_on_device(ProxycclAgent *agent, ProxycclLink *link, int writes,
                                                     const ProxycclCopier *copier, const ProxycclDeviceCopies *copies);
/* The registrations that a transfer's blocks belong to on one side, and the ledger that has them: `count` rows of
 * (number, address of a block), which outlive the transfer, as the ledger does. It does not begin, and a copy of the
 * CPU or the kernel goes no further, when one has ended. */
void proxyccl_transfer_guard(ProxycclTransfer *transfer, int remote, const uint64_t *ledger, const uint64_t *rows,
                             uint64_t count);
/* The number by which records name its peer and path. */
void proxyccl_transfer_set_label(ProxycclTransfer *transfer, uint32_t label);
/* Cancels it if it is active, and frees it. 0, or after 30 s EBUSY, as of proxyccl_transfer_cancel: its staging must
 * stay. */
int proxyccl_transfer_release(ProxycclTransfer *transfer);
/* Starts it. `message`: told to the peer when the data has arrived; NULL: none. `stream`: of the device that copies; it
 * then runs after the stream's earlier work, and before its later work. NULL: none. A short transfer without a stream
 * ends before it returns. 0, EBUSY if it is active, EMSGSIZE, or ENOMEM. */
int proxyccl_transfer_post(ProxycclTransfer *transfer, const char *message, uint64_t bytes, const uint64_t *stream);
/* Starts it once a stream has raised words[0]. When it has ended, however it did, words[1] is 1: the stream's later
 * work waits for that. The words are 0 before, of this start alone, in memory that streams write and wait for, and
 * outlive it. For a transfer that no device copies. 0 or an error as of proxyccl_transfer_post. */
int proxyccl_transfer_post_after(ProxycclTransfer *transfer, const char *message, uint64_t bytes, uint64_t *words);
/* Ends it as canceled if it is active. A device's copies are waited for, and so is the stream's work before them, at
 * most 30 s; requests to libfabric, of this side or the peer's, which can't be taken back, until the time-out. 0: its
 * local memory is no longer touched. EBUSY: some of these requests still may touch it. It stays active, and ends as
 * canceled after the last of them. */
int proxyccl_transfer_cancel(ProxycclTransfer *transfer, uint64_t timeout_ns);
ProxycclTransferState proxyccl_transfer_state(const ProxycclTransfer *transfer);
/* Copies a piece of it, if there is one that nobody copies yet, or looks whether the device is done. The state
 * afterwards. */
ProxycclTransferState proxyccl_transfer_help(ProxycclTransfer *transfer);
/* Waits until it is not active, and helps meanwhile. The state, which is ACTIVE after a time-out; at most the copies of
 * a piece pass after that. */
ProxycclTransferState proxyccl_transfer_wait(ProxycclTransfer *transfer, uint64_t timeout_ns);
/* The errno of a failed copy; of a device's, the driver's status times -1. */
int proxyccl_transfer_error(const ProxycclTransfer *transfer);
/* Of one that was refused or failed. */
void proxyccl_transfer_fault(const ProxycclTransfer *transfer, ProxycclFault *fault);
void proxyccl_transfer_times(const ProxycclTransfer *transfer, ProxycclTransferTimes *times);

#endif
