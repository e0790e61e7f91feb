/* The engine of transfers between agents. Agents may join and leave at any time, and name memory by its address.
 *
 * An agent has one thread, which sleeps until a socket or a caller has work for it. A link is a socket from one agent
 * to another: the side that opened the link sends requests, and the other side serves them. A transfer copies a list of
 * blocks over one link, or within the agent. A transfer's path is the method that moves its data: copies by threads
 * (with the CPU or process_vm_readv and process_vm_writev), the link's socket, libfabric, copies by a device to which
 * both sides are mapped, or stages between a device and a link. Each path has its own function to create transfers.
 *
 * Every function may be called from any thread at any time. No function waits for a peer without a time limit.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

enum { PROXYCCL_SECRET_BYTES = 16, PROXYCCL_LONGEST_MESSAGE = 1 << 28, PROXYCCL_MOST_UNSENT = 1 << 29 };

typedef struct ProxycclAgent ProxycclAgent;
typedef struct ProxycclLink ProxycclLink;
typedef struct ProxycclTransfer ProxycclTransfer;

typedef enum ProxycclTransferState {
  PROXYCCL_TRANSFER_NEW,      /* created, not yet posted */
  PROXYCCL_TRANSFER_ACTIVE,   /* posted and not yet ended */
  PROXYCCL_TRANSFER_DONE,     /* all data has arrived */
  PROXYCCL_TRANSFER_CANCELED, /* this side canceled the transfer */
  PROXYCCL_TRANSFER_LOST,     /* the link ended */
  PROXYCCL_TRANSFER_REFUSED,  /* the peer has not registered a block; see ProxycclOutcome */
  PROXYCCL_TRANSFER_FAILED,   /* a copy failed; see ProxycclOutcome */
  PROXYCCL_TRANSFER_STALE     /* a granted block was revoked before the copy was complete */
} ProxycclTransferState;

/* The reason why a transfer could not access memory. */
typedef enum ProxycclFaultKind {
  PROXYCCL_FAULT_NONE,         /* no fault, or its reason is unknown */
  PROXYCCL_FAULT_DEREGISTERED, /* the peer deregistered the memory */
  PROXYCCL_FAULT_FREED,        /* the peer's memory is registered, but not mapped in its process */
  PROXYCCL_FAULT_FREED_HERE,   /* the memory is not mapped in this process */
  PROXYCCL_FAULT_PROTECTED,    /* the memory is mapped in both processes, but protected */
  PROXYCCL_FAULT_ENDED_HERE    /* this agent deregistered the memory */
} ProxycclFaultKind;

typedef struct ProxycclFault {
  ProxycclFaultKind kind;
  uint64_t address; /* address of the first inaccessible byte, in the process that owns the memory */
} ProxycclFault;

/* The times when a transfer began and ended, in ns of CLOCK_MONOTONIC. */
typedef struct ProxycclTransferTimes {
  uint64_t posted;   /* when the last post began */
  uint64_t returned; /* when the last post returned */
  uint64_t ended;
} ProxycclTransferTimes;

/* The state of a transfer, and what its last start led to. */
typedef struct ProxycclOutcome {
  ProxycclTransferState state;
  ProxycclTransferTimes times;
  int32_t error;       /* the errno of a failed copy, or the negated driver status of a failed copy by a device */
  ProxycclFault fault; /* for a transfer that was refused or failed */
} ProxycclOutcome;

/* An agent's records of the transfers that end during a trace, in memory that other processes map. Only the agent's
 * process writes the records and `count`; tracing processes write `until`. */
enum { PROXYCCL_TRANSFER_RECORDS = 4096 };
typedef struct ProxycclTransferRecord {
  uint64_t posted, ended, bytes, blocks;
  uint32_t label; /* set by proxyccl_transfer_set_label */
  uint16_t writes, state;
} ProxycclTransferRecord;
typedef struct ProxycclTransferLog {
  uint64_t until; /* transfers that end after this time are not recorded */
  uint64_t count; /* records written so far; record i is at i % PROXYCCL_TRANSFER_RECORDS */
  ProxycclTransferRecord records[4096];
} ProxycclTransferLog;

/* The driver's functions for a device that copies (runtime_table.h, memory_pool.h); NULL for a missing function. */
typedef struct ProxycclCopier {
  int (*copy)(void *to, const void *from, size_t bytes, void *stream);
  int (*write64)(void *stream, uint64_t *word, uint64_t value, unsigned flags);
  int (*event_record)(void *event, void *stream);
  int (*event_query)(void *event);
  int (*current)(uint64_t *context);
  int (*make_current)(uint64_t context);
  int (*exchange_capture_mode)(int *mode);
  uint64_t context; /* the device's context */
  int32_t relaxed;  /* the thread's stream capture mode in which these calls are allowed during a capture */
} ProxycclCopier;

/* The copies that a device makes for a transfer, and their stream. All memory that the fields refer to must outlive the
 * transfer. */
typedef struct ProxycclDeviceCopies {
  const uint64_t *rows; /* (to, from, bytes) of each copy by the copy engine, with device addresses */
  uint64_t count;
  uint64_t launch;        /* a ProxycclLaunch that copies the blocks that are not in `rows`, or 0 */
  uint64_t blocks, bytes; /* blocks and bytes of the whole transfer */
  uint64_t stream;        /* the stream for a post without a stream */
  uint64_t event;         /* never recorded, so that a query of the event only tells whether the device has failed */
  uint64_t word, word_on_device; /* a pinned word of this transfer: its CPU address and device address */
} ProxycclDeviceCopies;

enum { PROXYCCL_STAGES = 4, PROXYCCL_STAGE_BYTES = 1 << 19 };
enum { PROXYCCL_AGENT_RAILS = 8, PROXYCCL_ADDRESS_BYTES = 512 }; /* see proxyccl_agent_set_fabric */

/* Pinned buffers, called stages, through which data moves between a device's memory and another process. Each stage has
 * PROXYCCL_STAGE_BYTES bytes, the same address for the device and the CPU, and its own event. A copy from the device
 * runs on the stage's own stream; all copies to the device run on the first stage's stream. The last stream and event
 * are for memory that is not pinned. */
typedef struct ProxycclStaging {
  const ProxycclCopier *copier;
  uint64_t memory[PROXYCCL_STAGES]; /* the stages' addresses; the stages are consecutive */
  int32_t by_fabric;                /* 1 if the stages are registered with the agent's libfabric endpoints */
  uint64_t base;                    /* the address of the first byte for libfabric requests */
  uint64_t descriptors[PROXYCCL_AGENT_RAILS], keys[PROXYCCL_AGENT_RAILS]; /* by rail */
  uint64_t streams[PROXYCCL_STAGES + 1], events[PROXYCCL_STAGES + 1];
} ProxycclStaging;

/* Creates an agent and its thread. Takes ownership of the listening sockets, even if it fails. The first listener is a
 * Unix socket and the others are TCP sockets, on which the agent sends `token` first, so that a peer can tell the agent
 * from other programs. `secret`: the bytes that a peer must send first. `copied`: whether peers of this host may ask
 * for permission to copy from and to this process (see proxyccl_ask_to_copy). `losses`: an eventfd that is signaled
 * when a link that the agent opened is lost, and that outlives the links. `log`: where the agent records transfers
 * until it is stopped, or NULL. Returns NULL on failure and sets errno. */
ProxycclAgent *proxyccl_agent_create(const char *name, const char *token, const char *secret, int copied,
                                     const int *listeners, uint32_t count, int losses, ProxycclTransferLog *log);
/* Ends the agent's thread, links and transfers. All functions may still be called afterwards, but all except the
 * release functions then fail or do nothing. */
void proxyccl_agent_stop(ProxycclAgent *agent);
/* Releases the handle. The agent is freed once its handle, its links and its transfers are all released. */
void proxyccl_agent_release(ProxycclAgent *agent);
/* For a fork's child: closes the child's copies of the agent's descriptors, so that peers notice when the parent
 * ends. */
void proxyccl_agent_forget(ProxycclAgent *agent);
/* Copies at most `room` records, from number `next` on. Skips records that are overwritten. Sets `next` to the number
 * after the last copied record, and `lost` to the number of records that were overwritten before they could be copied.
 * Returns the number of copied records. */
uint32_t proxyccl_transfer_log_read(const ProxycclTransferLog *log, uint64_t *next, ProxycclTransferRecord *records,
                                    uint32_t room, uint64_t *lost);
/* Returns the address of the agent's secret. A peer of this host reads the secret to check that the peer can read this
 * process's memory. */
uint64_t proxyccl_agent_secret(const ProxycclAgent *agent);
/* Adds regions that peers may reach through sockets or, if `adds` is 0, removes regions that were added. A region that
 * was added n times must be removed n times. `rows`: the first address and the number of bytes of each of the `count`
 * regions. `staging`: the stages of the device that owns the memory; NULL for host memory. `staging` also identifies
 * the device in later calls, and the stages must outlive the agent's thread. A removal waits at most 30 s for the
 * device's copies from and to its memory; afterwards no socket accesses removed memory that no other region contains.
 * Returns 0 or ENOMEM; ENOMEM changes nothing. */
int proxyccl_agent_change_memory(ProxycclAgent *agent, const ProxycclStaging *staging, const uint64_t *rows,
                                 uint64_t count, int adds);
/* Returns the number of unread bytes in the inbox. A message in the inbox consists of the lengths of the sender's name
 * and the text (8 bytes each), the name, and the text. */
uint64_t proxyccl_agent_unread(const ProxycclAgent *agent);
/* Moves as many whole messages to `to` as fit into `room` bytes. Returns the number of moved bytes. */
uint64_t proxyccl_agent_take(ProxycclAgent *agent, char *to, uint64_t room);
/* Waits until the inbox has a message, or the agent is stopped. Returns 1 if the inbox has a message. */
int proxyccl_agent_wait(ProxycclAgent *agent, uint64_t timeout_ns);

/* Reads memory of another process by process_vm_readv. Callers use this function to check that process_vm_readv works
 * and that `pid` is the intended process. Returns 0 or an errno. */
int proxyccl_process_read(int32_t pid, uint64_t address, char *to, uint64_t bytes);

/* Asks the agent at the other end of a connected Unix socket to let this process copy from and to the agent's process.
 * The request is needed where Yama permits such copies only to parent processes. Use the socket for nothing else,
 * because the answer may arrive after the time-out. Returns 0 or an errno, which is ETIMEDOUT after `timeout_ms`. */
int proxyccl_ask_to_copy(int socket, const char *secret, int timeout_ms);

/* An agent's ledger shows which of its registrations are valid, in memory that peers of the host map. Each registration
 * has a number n, which is never used again, and uses the word n % PROXYCCL_LEDGER_WORDS. The word is n while the
 * memory is registered, and ~n if the memory was freed before it was deregistered. Word 0 counts the registrations that
 * have ended. Unused pages of a ledger take no memory. */
enum {
  PROXYCCL_LEDGER_WORDS = 1 << 20,
  PROXYCCL_LEDGER_KEYS = 1 << 16, /* the number of words for grants with keys, which are the last words */
  PROXYCCL_LEDGER_PLACES = 1 << 10,
  PROXYCCL_LEDGER_COUNTS = 1 << 12
};
typedef struct ProxycclLedger {
  uint64_t words[PROXYCCL_LEDGER_WORDS];
  uint64_t deadlines[PROXYCCL_LEDGER_KEYS]; /* for each grant with a key, the deadline (see ProxycclGranted) */
  uint32_t places;                          /* the number of places that were used so far */
  /* For each place, the numbers of active transfers of granted blocks, by a hash of the grant. */
  uint32_t active[PROXYCCL_LEDGER_PLACES][PROXYCCL_LEDGER_COUNTS];
} ProxycclLedger;
void proxyccl_ledger_begin(ProxycclLedger *ledger, const uint64_t *numbers, uint64_t count);
/* Ends registrations that have not ended yet. `freed`: whether the memory is no longer mapped. Thread-safe. */
void proxyccl_ledger_end(ProxycclLedger *ledger, const uint64_t *numbers, uint64_t count, int freed);
uint64_t proxyccl_ledger_count(const ProxycclLedger *ledger);
/* A granted block has a number and a word like a registration. The word is n until the owner revokes the block, ~n
 * while the owner waits for active transfers, and then 0. The next function sets the words to ~n or, if `ends` is not
 * 0, to 0; after that the owner may overwrite blocks that others read. Unlike `proxyccl_ledger_end`, this function does
 * not count an end, so peers do not check all their registrations again. */
void proxyccl_ledger_revoke(ProxycclLedger *ledger, const uint64_t *numbers, uint64_t count, int ends);
/* Returns the index of the first number whose word is 0 (or, if `starts` is not 0, ~n), or `count` if there is none. A
 * reader calls this function after it has copied the granted memory: the data of all numbers before the index was not
 * overwritten. */
uint64_t proxyccl_ledger_revoked(const ProxycclLedger *ledger, const uint64_t *numbers, uint64_t count, int starts);
/* Takes a place in a ledger for this process's transfers, until the open file description of `file`, a descriptor of
 * the ledger's file, is closed. The description must have no other place. Returns the place, or a negated errno: EUSERS
 * if all places are taken. */
int proxyccl_ledger_join(ProxycclLedger *ledger, int file);
/* Waits until no transfer of a grant is active in a process that maps the ledger. `file`, `own`: the argument and the
 * result of the calling process's proxyccl_ledger_join. `grant`: the number of the grant's first block. Returns 0,
 * EBUSY after the time-out, or an errno of fcntl. */
int proxyccl_ledger_wait(ProxycclLedger *ledger, int file, uint32_t own, uint64_t grant, uint64_t timeout_ns);

/* Creates a link over a connected stream socket. Takes ownership of the socket, even if it fails. `peer_secret`: the
 * secret of the agent at the other end. `process`: a pidfd of the peer's process, which this function also takes
 * ownership of, or -1. `pid`: the id of the peer's process if process_vm_readv works for that process, else 0.
 * Returns NULL on failure and sets errno. */
ProxycclLink *proxyccl_link_create(ProxycclAgent *agent, int socket, const char *peer_secret, int process, int32_t pid);
/* Lets a new link use rails: each of the agent's rails reaches the peer's rail of the same number. `own`, `theirs`: the
 * addresses of the agent's rails and of the peer's, PROXYCCL_ADDRESS_BYTES bytes for each. Returns the number of rails
 * that the link uses. */
uint32_t proxyccl_link_use_rails(ProxycclLink *link, const char *own, uint64_t own_bytes, const char *theirs,
                                 uint64_t their_bytes);
/* Returns a bit for each rail on which the link has outstanding requests, none of which has completed for 2 s. */
uint32_t proxyccl_link_stalled(const ProxycclLink *link);
/* Ends the link, and ends the link's active transfers with the state LOST. */
void proxyccl_link_end(ProxycclLink *link);
/* Ends the link and releases its handle. */
void proxyccl_link_release(ProxycclLink *link);
/* Returns why the link has ended (static text), or NULL while it works. */
const char *proxyccl_link_lost(const ProxycclLink *link);
/* Polls the socket, so that proxyccl_link_lost reports a disconnect immediately. */
void proxyccl_link_look(ProxycclLink *link);
/* Sends a message over a link, after all earlier messages, or to the agent itself if `link` is NULL. Returns 0,
 * ENOTCONN, EMSGSIZE, ENOMEM, or ENOBUFS if too many messages wait for the peer. */
int proxyccl_agent_tell(ProxycclAgent *agent, ProxycclLink *link, const char *message, uint64_t bytes);

/* The blocks of a transfer: two arrays of `count` pairs (address, bytes). At each index, the local and the remote block
 * have the same length, at least one byte. Both arrays must outlive the transfer. */
typedef struct ProxycclBlocks {
  int32_t writes; /* 1 if data moves to the remote blocks, 0 if it moves to the local blocks */
  const uint64_t *local, *remote;
  uint64_t count;
} ProxycclBlocks;

/* The following functions create transfers, one function for each path. `link` is NULL for a transfer within the agent.
 * On failure these functions return NULL and set errno.
 *
 * proxyccl_transfer_create creates a transfer that threads copy. `pid`: the process that the kernel copies from and to,
 * or 0 if the CPU copies between addresses of this process. `staging`: stages that only this transfer uses; NULL if the
 * local blocks are in host memory. */
ProxycclTransfer *proxyccl_transfer_create(ProxycclAgent *agent, ProxycclLink *link, const ProxycclBlocks *blocks,
                                           const ProxycclStaging *staging, int32_t pid);
/* Creates a transfer through the link's socket. */
ProxycclTransfer *proxyccl_transfer_create_by_socket(ProxycclAgent *agent, ProxycclLink *link,
                                                     const ProxycclBlocks *blocks);
/* Creates a transfer between a device and the peer through `staging`, stages that only this transfer uses and that must
 * outlive the transfer. `by_fabric`: whether the peer's rails read and write the stages. `keys`: if this agent's rails
 * read and write the peer's blocks, the words of each block, its address for libfabric and its key for each of the
 * link's rails, which must outlive the transfer; otherwise NULL. With neither, the socket carries the data. */
ProxycclTransfer *proxyccl_transfer_create_staged(ProxycclAgent *agent, ProxycclLink *link,
                                                  const ProxycclBlocks *blocks, const ProxycclStaging *staging,
                                                  int by_fabric, const uint64_t *keys);
/* A rail: an agent's libfabric endpoint on one interface, by which transfers read and write registered memory of peers.
 */
typedef struct ProxycclFabricPort {
  uint64_t endpoint, queue, fabric, peers; /* fid_ep *, fid_cq *, fid_fabric *, fid_av * */
  int32_t descriptor;                      /* the queue's descriptor, or -1; readable when the queue has completions */
  uint32_t depth;                          /* the highest number of outstanding requests */
  uint64_t max_message;                    /* most bytes of one request */
} ProxycclFabricPort;
/* Sets an agent's rails, at most PROXYCCL_AGENT_RAILS, which outlive the agent's thread. Returns 0 or an errno, which
 * is ENOSYS in a build without libfabric. */
int proxyccl_agent_set_fabric(ProxycclAgent *agent, const ProxycclFabricPort *ports, uint32_t count);
/* Creates a transfer by the agent's rails. `rows`: `count` rows of (local address, remote address for requests, bytes,
 * address in the peer's process), followed by (local descriptor, remote key) for each of the link's rails. The rows
 * must outlive the transfer. */
ProxycclTransfer *proxyccl_transfer_create_by_fabric(ProxycclAgent *agent, ProxycclLink *link, int writes,
                                                     const uint64_t *rows, uint64_t count);
/* Creates a transfer that a device copies. `copier` must outlive the transfer. */
ProxycclTransfer *proxyccl_transfer_create_on_device(ProxycclAgent *agent, ProxycclLink *link, int writes,
                                                     const ProxycclCopier *copier, const ProxycclDeviceCopies *copies);
/* Sets the registrations of a transfer's remote blocks if `remote` is 1, else of its local blocks: `count` rows of
 * (registration number, block address), and the ledger with these numbers. Rows and ledger must outlive the transfer.
 * After one of these registrations has ended, the transfer does not begin, and the CPU or the kernel copies no further
 * piece. After a registration of a local block has ended, the link's socket moves no further data of the transfer, and
 * libfabric gets no further requests. */
void proxyccl_transfer_guard(ProxycclTransfer *transfer, int remote, const ProxycclLedger *ledger, const uint64_t *rows,
                             uint64_t count);
/* The grant of a transfer's remote blocks. The ledger, the numbers, the deadline and the place must outlive the
 * transfer. */
typedef struct ProxycclGranted {
  ProxycclLedger *ledger;  /* the owner's ledger */
  const uint64_t *numbers; /* the numbers of the blocks, in any order */
  uint64_t count;
  uint64_t grant;           /* the number of the grant's first block */
  const uint64_t *deadline; /* when the lease ends, in ns of CLOCK_MONOTONIC; 0 without a lease */
  uint32_t place;           /* this process's place in the ledger */
} ProxycclGranted;
/* Sets the grant of a transfer. A start then returns ESTALE if a block is revoked, and a transfer whose blocks are
 * revoked before its copies are complete ends as PROXYCCL_TRANSFER_STALE. A write must be a transfer of
 * proxyccl_transfer_create, whose copies have all ended when the transfer ends. */
void proxyccl_transfer_set_grant(ProxycclTransfer *transfer, const ProxycclGranted *granted);
/* Sets a number that the transfer's log records contain, and by which Python finds the transfer's peer and path. */
void proxyccl_transfer_set_label(ProxycclTransfer *transfer, uint32_t label);
/* Cancels the transfer if it is active, and frees it. Returns 0. If the cancel has not succeeded after 30 s, returns
 * EBUSY (see proxyccl_transfer_cancel), and the transfer's stages must then stay allocated. */
int proxyccl_transfer_release(ProxycclTransfer *transfer);
/* Starts the transfer. `message`: a message to send to the peer once the data has arrived, or NULL. `stream`: a stream
 * of the copying device, or NULL; the copies run after the stream's earlier work and before its later work. `words`:
 * NULL, or for a transfer that no device copies two words, which are 0: the transfer starts once a stream has set
 * words[0] to a nonzero value, and words[1] becomes 1 when the transfer has ended, successfully or not. The words must
 * not be used for another start, must be in memory that streams can write and wait for, and must outlive the transfer.
 * Without `stream` and `words`, a short transfer that threads copy ends before the function returns. Returns 0, EBUSY
 * if the transfer is active, EMSGSIZE, ENOMEM, or ESTALE if a granted block is revoked. */
int proxyccl_transfer_post(ProxycclTransfer *transfer, const char *message, uint64_t bytes, const uint64_t *stream,
                           uint64_t *words);
/* Cancels an active transfer. A device's copies and both agents' libfabric requests can't be withdrawn, so this
 * function waits for them: at most 30 s for the copies and the stream's work before the copies, and at most
 * `timeout_ns` for libfabric requests. Returns 0 once nothing accesses the local memory. Returns EBUSY if libfabric
 * requests may still access the local memory: the transfer then stays active, and ends as canceled after the last of
 * the requests. */
int proxyccl_transfer_cancel(ProxycclTransfer *transfer, uint64_t timeout_ns);
ProxycclTransferState proxyccl_transfer_state(const ProxycclTransfer *transfer);
/* Advances the transfer: copies a piece that no thread has begun, or polls the device, the link or the fabric. Returns
 * the transfer's state afterwards. */
ProxycclTransferState proxyccl_transfer_help(ProxycclTransfer *transfer);
/* Waits until the transfer has ended, and advances it during the wait, as proxyccl_transfer_help does. Returns the
 * state, which is ACTIVE after a time-out. The wait exceeds the time-out by at most the time to copy one piece. */
ProxycclTransferState proxyccl_transfer_wait(ProxycclTransfer *transfer, uint64_t timeout_ns);
ProxycclOutcome proxyccl_transfer_outcome(const ProxycclTransfer *transfer);
