/* Declares the structs and functions that the C files of this directory share. See transfers.h.
 *
 * The agent's mutex protects all fields except those that are described as atomic. Copies run without the mutex; each
 * transfer counts its running copies.
 */
#pragma once

#include <pthread.h>
#include <signal.h>
#include <stddef.h>
#include <sys/types.h>
#include <sys/uio.h>

#include "buffer.h"
#include "launch.h"
#include "queue.h"
#include "runtime_table.h"
#include "transfers.h"

enum {
  FRAME_BLOCKS = 512,        /* most blocks of one frame */
  FRAME_BYTES = 512 << 10,   /* most bytes of one frame's data */
  WINDOW = 16,               /* most unanswered frames of one link */
  VERSION = 3,               /* version of the frames' format */
  TURN_BYTES = 2 << 20,      /* most bytes that a link sends or receives before other links are served */
  PIECE_BYTES = 1 << 20,     /* most bytes of one piece of a copy */
  SHORT_BYTES = 64 << 10,    /* a thread that queues a device copy of at most this length spins until the copy ends */
  SHORT_NS = 20000,          /* longest spin for a short device copy; waking a thread takes longer */
  SHORTEST_PAUSE_NS = 20000, /* the agent's thread pauses at least this long between two polls */
  ROW = 4,                   /* words of a libfabric request that are the same for all rails: see Rdma */
  FED = 2,                   /* most answers of one link that use stages at the same time */
  AHEAD_BYTES = 64 << 10     /* most bytes that are read ahead from a socket */
};

/* A device or network adapter that does not stop within this time is assumed to hang. */
#define LONGEST_CANCEL_NS 30000000000ull
#define OUT_OF_MEMORY "this process is out of memory" /* a reason for the end of a link */

/* The tag of an epoll event: 0 for the eventfd, else a pointer, whose low alignment bits hold the kind of object. */
enum { TAG_LINK = 0, TAG_PROCESS = 1, TAG_LISTENER = 2, TAG_FABRIC = 3, TAG_BITS = 3 };

/* The addresses of a registered region. */
typedef struct Bounds {
  uint64_t start, end;
  uint64_t reach; /* in sorted regions, the end of the contiguous registered memory that contains the region */
} Bounds;

/* The registered regions of one owner, as arrays of Bounds. */
typedef struct Regions {
  Buffer sorted;         /* by start, then end */
  Buffer added, removed; /* changes that are not yet in `sorted` */
  Buffer spare;          /* memory for the next sorted array */
} Regions;

typedef struct Position {
  uint64_t index, offset;
} Position;

/* A list of reads or of writes of a peer's memory by libfabric, which are divided over the link's rails. */
typedef struct Rdma {
  Node node; /* element of the list of Rdmas with requests to post */
  ProxycclLink *link;
  int writes;
  const uint64_t *rows;             /* see proxyccl_transfer_create_by_fabric */
  Position at;                      /* start of the data for which no request is posted yet */
  uint64_t left;                    /* bytes of the data for which no request is posted yet */
  uint64_t unanswered;              /* number of posted requests without a completion */
  int error;                        /* the error of the first request that failed */
  uint64_t fault;                   /* the address in the peer that this request accessed; 0 if the rail has failed */
  int canceled;                     /* whether the agent stopped before the requests were complete */
  struct Request *request;          /* must stand whenever data is posted; NULL for the data of a stage */
  void (*ended)(struct Rdma *self); /* called when the last request has completed; may free `self` */
} Rdma;

/* A buffer through which a link serves requests for a device's memory: one of the device's pinned stages or, if all are
 * in use, pageable memory. */
typedef struct Stage {
  Node node; /* element of the agent's list of stages with a device copy */
  ProxycclAgent *agent;
  struct Device *device;
  uint32_t number; /* index of the pinned stage; PROXYCCL_STAGES for pageable memory */
  char *memory;
  int copying; /* whether a device's copy or a libfabric request uses the stage */
  int status;  /* the driver's status of a failed copy; -1 if a libfabric request failed; 0 otherwise */
  Rdma rdma;   /* the libfabric requests of the stage */
  uint64_t row[ROW + 2 * PROXYCCL_AGENT_RAILS]; /* the row of `rdma` */
  uint64_t turn;      /* number of the stage's last device copy; each agent numbers its copies */
  ProxycclLink *link; /* the link that uses the stage; NULL if the link is lost */
} Stage;

/* A device whose memory peers reach through sockets. */
typedef struct Device {
  struct Device *next;
  const ProxycclStaging *staging;
  Regions regions;
  int taken[PROXYCCL_STAGES];
} Device;

typedef enum FrameKind {
  FRAME_HELLO = 1,
  FRAME_MESSAGE,
  FRAME_WRITE,
  FRAME_READ,
  FRAME_ANSWER,
  FRAME_PERMIT,
  FRAME_CHECK,
  FRAME_ADDRESS,
  FRAME_FETCH,
  FRAME_STORE
} FrameKind;

/* The head of each frame on a socket. Both sides must have the same byte order; otherwise the version in the greeting
 * does not match. A HELLO, the greeting, has the version in `count`, followed by `bytes` bytes: the secret and the
 * sender's name. A PERMIT asks the receiver to let the sender's process copy from and to the receiver's process. A
 * PERMIT is sent instead of a HELLO, as the only frame of its connection, and has the version in `count`, followed by
 * the secret. A MESSAGE is followed by a text of `bytes` bytes. An ADDRESS is followed by the addresses of the sender's
 * rails, `bytes` bytes. A WRITE or READ is followed by `count` blocks (address, bytes) of the receiver's
 * memory, and a WRITE's blocks by their data. A FETCH or STORE is followed by `count` blocks of the receiver's memory
 * and an Origin, which names memory of the sender. By libfabric, the receiver reads a FETCH's data from the sender's
 * memory, and writes a STORE's data to the sender's memory. A CHECK is followed by `count` blocks, and asks whether the
 * blocks are registered and mapped. An ANSWER is sent for each WRITE, READ, FETCH, STORE, PERMIT and CHECK, in the
 * order of these frames. The `count` of an ANSWER is 0 or an errno. If a block is not registered (EACCES), not mapped
 * (EFAULT) or protected (EPERM), `bytes` is the block's number. The ANSWER to a READ without an error is followed by
 * `bytes` bytes of data and a second head. If blocks are freed or deregistered while the data is sent, the errno in the
 * second head is nonzero, and the rest of the data is zeros. */
typedef struct Frame {
  uint32_t kind, count;
  uint64_t bytes;
} Frame;

/* The address and the keys, by rail, by which libfabric requests name registered memory of a peer. */
typedef struct Origin {
  uint64_t address, keys[PROXYCCL_AGENT_RAILS];
} Origin;

/* A list of blocks that a link moves in frames, and the position that the link has reached. If `asks` is set, the link
 * sends a CHECK of one block instead. */
typedef struct Request {
  Node node; /* element of the link's list of requests with frames to send */
  ProxycclTransfer *transfer;
  int active; /* whether the request has been started on the link and has not ended */
  int writes;
  const struct iovec *local, *remote;
  uint64_t count;
  Position at;          /* start of the data that no frame names yet */
  uint64_t left;        /* bytes of the data that no frame names yet */
  uint32_t unanswered;  /* number of unanswered frames */
  uint32_t refusal;     /* the first nonzero errno of an answer */
  int asks;             /* whether the request sends a CHECK of the memory at `fault`, where a copy has failed */
  ProxycclFault fault;  /* the fault that the refusal reports */
  const Origin *origin; /* the local memory that the peer reads or writes by libfabric; NULL if frames carry the data */
  void (*ended)(struct Request *self); /* called after the last answer, or when the link is lost */
} Request;

/* A frame that the peer has not answered. */
typedef struct Awaited {
  Request *request; /* the frame's request; NULL if the request was canceled */
  Position at;      /* position of the frame's first block in the request's lists */
  uint64_t bytes;   /* bytes of a READ's data; 0 for other frames */
} Awaited;

/* An answer that waits to be sent. */
typedef struct Answer {
  Node node; /* element of the link's list of answers */
  uint32_t error;
  uint64_t bytes; /* bytes of a READ's data; after an error, the number of the block that caused the error */
  Device *device; /* the device whose memory the request names; NULL for host memory */
  Stage *stage;   /* the stage for the request's data; NULL if no stage is needed or none is assigned yet */
  struct iovec staged;
  int by_fabric, fetches; /* whether the request is a FETCH or STORE, and whether it is a FETCH */
  int steps; /* number of steps of a FETCH or STORE that have begun; ANSWER_STEPS once all steps are done */
  Origin origin;
  uint64_t data; /* bytes of a FETCH's or STORE's data */
  uint64_t count;
  struct iovec blocks[]; /* the blocks of a READ, a FETCH or a STORE */
} Answer;

/* The frame that is being sent: a head, data from blocks, and the second head of an answer. */
typedef struct Sending {
  Buffer head;
  size_t sent; /* bytes of the head that have been sent */
  const struct iovec *blocks;
  uint64_t count;
  Position at;
  uint64_t left;        /* bytes of data that have not been sent */
  Request *request;     /* the request that owns the blocks; NULL for an answer or messages */
  const Answer *answer; /* the answer that owns the blocks; NULL if `own` holds the data */
  void *own;            /* memory to free once the frame is sent, or NULL */
  Stage *stage;         /* the stage of an answer's data, or NULL */
  uint64_t memory;      /* the value of the agent's `memory` when the blocks of the answer were last checked */
  Frame tail;           /* the second head, after the data of an answer */
  size_t tail_left;     /* bytes of `tail` that have not been sent */
} Sending;

typedef enum FramePart { IN_HEAD, IN_BODY, IN_DATA, IN_TAIL } FramePart;

/* The frame that is being received: a head, a body that the link stores, data for blocks, and the second head of an
 * answer with data. */
typedef struct Receiving {
  Frame frame; /* the head, or the second head */
  FramePart part;
  uint64_t left; /* bytes of the part that have not arrived */
  Stage *stage;  /* the stage that receives a WRITE's data; NULL if the data goes directly to the blocks */
  struct iovec staged;
  Buffer body;
  uint64_t body_bytes;        /* bytes of the whole body */
  const struct iovec *blocks; /* a WRITE's blocks, in `body`; NULL to discard the data */
  uint64_t count;
  Position at;
  uint32_t error;  /* the errno for the answer to a WRITE */
  uint64_t block;  /* the number of the block that caused `error` */
  uint64_t memory; /* see Sending.memory */
} Receiving;

/* One rail of a link. */
typedef struct LinkRail {
  uint64_t address; /* the fi_addr_t of the peer's rail */
  uint64_t bytes;   /* bytes of the outstanding requests; each request has at least one byte */
  uint64_t moved;   /* when a request last completed, or was posted while none was outstanding (CLOCK_MONOTONIC, ns) */
  uint64_t failed;  /* when a request last failed (CLOCK_MONOTONIC, ns); 0 if none has */
} LinkRail;

struct ProxycclLink {
  ProxycclLink *next; /* next in the agent's list of links */
  ProxycclAgent *agent;
  int socket, process; /* the link's socket and the peer's pidfd; -1 if closed or missing */
  int serves;          /* whether the peer opened the link */
  int greeted;         /* whether the greeting has arrived, on a link that the peer opened */
  int asked;           /* whether a PERMIT has arrived, after which the peer sends nothing */
  uint32_t rails;      /* number of rails of this agent that reach the peer's rails of the same numbers */
  uint32_t known;      /* number of these rails whose addresses are in the address vectors */
  LinkRail rail[PROXYCCL_AGENT_RAILS];
  const char *lost;    /* atomic: why the link ended; NULL while it works */
  uint32_t references; /* number of references: from the handle, transfers, and stages that libfabric reads or writes */
  pid_t pid;           /* the peer's process id; 0 if all data moves through the socket */
  char *name;          /* the peer's name, on a link that the peer opened */
  uint32_t name_bytes;
  int writable;    /* whether the thread waits until the socket can be written */
  int helped;      /* whether a caller has polled the socket since the thread last checked */
  int resting;     /* whether the thread leaves the socket to polling callers */
  Buffer messages; /* whole frames (HELLO, ADDRESS, MESSAGE), to send before the next answer or request */
  Sending out;
  Receiving in;
  Queue requests; /* requests with frames to send, which send one frame each in turn */
  Awaited awaited[WINDOW];
  uint32_t oldest, unanswered;
  Queue answers;
  uint32_t answer_count;
  char *ahead; /* AHEAD_BYTES of memory for data that was read ahead */
  size_t ahead_at, ahead_end;
};

/* The registrations of a transfer's local or remote blocks: see proxyccl_transfer_guard. */
typedef struct Guard {
  const ProxycclLedger *ledger; /* NULL if only the peer checks the blocks */
  const uint64_t *rows;
  uint64_t count;
  uint64_t seen; /* word 0 of the ledger at the last successful check; UINT64_MAX before the first check */
} Guard;

/* The functions by which one kind of transfer moves its data. Each path has its own file, and a struct that begins with
 * a ProxycclTransfer. All functions are called with the agent locked; functions that copy unlock the agent during the
 * copy. */
typedef struct TransferPath {
  /* Begins a transfer that has bytes to move and a live link. `stream` is NULL if no device copies the data. */
  void (*begin)(ProxycclTransfer *self, const uint64_t *stream);
  /* Advances a transfer in the agent's list `looked_at`, without waiting. Returns 1 if the transfer has advanced.
   * `look` is NULL if this path's transfers leave the list when their stream starts them. */
  int (*look)(ProxycclTransfer *self);
  /* Copies a piece that no thread has begun. Returns 1, or 0 if no such piece or no free stage exists. `copy` is NULL
   * if threads copy nothing on this path. */
  int (*copy)(ProxycclTransfer *self);
  /* Advances a transfer whose request is not active, for a caller that polls it. `help` is NULL if `copy` or `look`
   * does this work. */
  void (*help)(ProxycclTransfer *self);
  /* Stops the transfer's work for a cancel, and waits until nothing accesses the local memory. Returns 1, or 0 on a
   * time-out. This function is called only if the transfer's request is not active; `finish` is NULL if such a transfer
   * has no work to stop. */
  int (*finish)(ProxycclTransfer *self, uint64_t timeout_ns);
  /* This function is called when the link of a transfer in the agent's list `copies` is lost. */
  void (*lose)(ProxycclTransfer *self);
  int silent; /* whether waiting callers must poll, because no event wakes them */
  int soon;   /* whether the agent's thread polls at the shortest interval, even if the transfer takes long */
} TransferPath;

struct ProxycclTransfer {
  Node node; /* element of at most one of the agent's lists */
  const TransferPath *path;
  ProxycclAgent *agent;
  ProxycclLink *link; /* the transfer's link; NULL for a transfer within the agent */
  int writes;
  uint64_t blocks, bytes;
  /* The blocks that a link or threads move. After a failed copy or libfabric request, `request` asks the peer whether
   * the peer's memory is still mapped. */
  Request request;
  ProxycclTransferState state; /* atomic */
  int error;
  int copying; /* number of threads that copy a piece, poll the device, or wait in `finish` */
  int cancel;
  int abandoned;   /* whether a cancel has timed out: the transfer ends as canceled once nothing accesses its memory */
  int orphaned;    /* whether the transfer is freed when it ends, because its handle has been released */
  Guard guards[2]; /* registrations of the local blocks and of the remote blocks */
  ProxycclGranted granted; /* the grant of the remote blocks; `count` is 0 without one */
  ProxycclFault fault;
  uint64_t *words; /* the words of proxyccl_transfer_post, or NULL */
  int rung;        /* whether the stream has started the transfer; 1 if no stream starts it */
  Buffer message;
  int has_message;
  ProxycclTransferTimes times;
  uint32_t label;
};

struct ProxycclAgent {
  pthread_mutex_t lock;
  pthread_cond_t changed; /* signaled when a transfer ends, a message arrives, a copy stops, or the agent stops */
  pthread_t thread;
  int epoll, wake;
  int spare; /* a spare descriptor: if the process runs out of descriptors, the thread closes it to accept and refuse a
                connection */
  int *listeners;
  uint32_t listener_count;
  int stopped;
  uint32_t resting;    /* number of links whose `resting` is set */
  uint32_t references; /* number of references: from the handle, links and transfers */
  char *name;
  char token[PROXYCCL_SECRET_BYTES], secret[PROXYCCL_SECRET_BYTES];
  int copied; /* whether peers may copy from and to this process */
  int losses; /* an eventfd to signal when links are lost */
  ProxycclLink *links;
  Queue copies;     /* transfers that threads copy piece by piece, in turn */
  uint32_t copying; /* number of pieces that threads are copying */
  Queue looked_at;  /* transfers to poll in turn: a device advances them, or a stream starts them */
  Buffer inbox;
  uint64_t unread;          /* atomic: a copy of inbox.used, for readers without the lock */
  ProxycclTransferLog *log; /* the records of transfers; NULL if none are recorded */
  struct Fabric *fabric;    /* the rails, or NULL */
  Regions host;
  Device *devices;
  uint64_t memory;     /* counts the changes of the registered regions */
  Queue stages;        /* stages with a device copy, the oldest copy first */
  int starved;         /* set when a link found no free stage for an answer: freeing a stage wakes the thread */
  int waits_for_stage; /* set when no transfer could copy a piece: freeing a stage of a transfer wakes the thread */
  int feeds;           /* set when the thread must try again to send the links' answers */
  uint64_t turns;
};

/* The functions of each file. A file calls only functions of the files above it. */

/* The functions of guard.c are called without the agent's lock. */
/* Installs this library's fault handler, unless the process uses the handler already. Returns 0 or an errno. */
int guard_install(void);
/* Removes SIGSEGV and SIGBUS from a set of signals to block, because the kernel ends the process if a thread that
 * blocks them faults. */
void guard_admit(sigset_t *blocked);
/* Copies `count` blocks to blocks of equal lengths, `bytes` bytes in all, as memmove does. The program may have freed
 * the blocks' memory. Returns the number of bytes before the first inaccessible byte, or `bytes` if all are
 * accessible. */
uint64_t guard_copy(const struct iovec *to, const struct iovec *from, uint64_t count, uint64_t bytes);

/* blocks.c */
/* Gets the memory of the blocks from `at` on, as at most `most_parts` parts with at most `most_bytes` bytes in all.
 * Returns the number of bytes in all parts. */
uint64_t blocks_parts(const struct iovec *blocks, uint64_t count, Position at, uint64_t most_bytes, uint32_t most_parts,
                      struct iovec *parts, uint32_t *part_count);
void blocks_advance(const struct iovec *blocks, Position *at, uint64_t bytes);
int is_mapped(const void *address); /* whether this process has the address mapped */

/* The functions of driver.c are called without the agent's lock, and return the driver's statuses. */
/* The calling thread's state before driver_enter, for driver_leave to restore. */
typedef struct Entered {
  uint64_t context;
  int mode;
} Entered;
/* Makes the device's context current, and allows calls that are forbidden while another thread captures a graph. */
Entered driver_enter(const ProxycclCopier *copier);
void driver_leave(const ProxycclCopier *copier, Entered before);
/* Queues copies between a stage's memory and a device's blocks, and records the stage's event. */
int staging_queue(const ProxycclStaging *staging, uint32_t stage, void *memory, int to_device,
                  const struct iovec *blocks, uint64_t count);
/* Waits for a stage's event. Returns PROXYCCL_RUNTIME_NOT_READY after the time-out; 0 queries the event. */
int staging_await(const ProxycclStaging *staging, uint32_t stage, uint64_t timeout_ns);

/* agent.c. All functions below are called with the agent locked. */
int agent_watch(ProxycclAgent *agent, int descriptor, uintptr_t tag, int operation, uint32_t events); /* 0 or errno */
void agent_wake(ProxycclAgent *agent);
struct timespec agent_deadline(uint64_t timeout_ns);
void agent_unreference(ProxycclAgent *agent); /* unlocks */
void agent_free(ProxycclAgent *agent);
int agent_receive(ProxycclAgent *agent, const char *name, uint64_t name_bytes, const char *message, uint64_t bytes);

/* regions.c */
/* Sets `device` to the device that owns the first block, or NULL for host memory. Returns the number of the first block
 * that is not in registered memory of this owner, or `count` if there is none. */
uint64_t agent_lacks(ProxycclAgent *agent, const struct iovec *blocks, uint64_t count, Device **device);

/* fabric.c */
size_t row_words(const ProxycclLink *link); /* returns the number of words in a row of an Rdma */
/* Adds to a row the words of each of the link's rails: the descriptor of the local stages, and the peer's key. */
void row_add_rails(uint64_t *row, const ProxycclLink *link, const ProxycclStaging *staging, const uint64_t *keys);
void rdma_start(Rdma *rdma, uint64_t bytes);
void rdma_drop(Rdma *rdma); /* drops the requests that are not posted */
/* Records the addresses of a peer's rails, and thereby the number of the link's rails. */
void fabric_know(ProxycclLink *link, const char *addresses, uint64_t bytes);
void fabric_poll(ProxycclAgent *agent);
uint64_t fabric_rest(ProxycclAgent *agent); /* returns the ns until the next poll; UINT64_MAX if none is needed */
void fabric_lose(ProxycclLink *link);       /* drops a lost link's requests that are not posted */
/* Waits at most a second for posted requests, and then ends the remaining requests without a completion, which is safe,
 * because the requests' memory is not reused before the endpoint is closed. */
void fabric_stop(ProxycclAgent *agent);

/* The functions of stages.c are called by the agent's thread. */
Stage *stage_take(ProxycclLink *link, Device *device); /* returns NULL if out of memory */
/* If no pinned stage is free, returns NULL; the agent's `feeds` is set when a stage becomes free. */
Stage *stage_take_pinned(ProxycclLink *link, Device *device);
void stage_give(Stage *stage); /* releases a stage that its link no longer needs */
void stage_copy(Stage *stage, int to_device, const struct iovec *blocks, uint64_t count); /* unlocks the agent */
/* Copies by libfabric: from the stage to a peer's memory if `writes`, else from the peer's memory to the stage. */
void stage_carry(Stage *stage, int writes, uint64_t bytes, const Origin *origin);
void stages_look(ProxycclAgent *agent);   /* unlocks the agent during the call; sets `feeds` if copies have ended */
void stages_finish(ProxycclAgent *agent); /* waits for all copies; called after the thread has ended */

/* link.c */
ProxycclLink *link_new(ProxycclAgent *agent, int socket, int process, int serves);
void link_lose(ProxycclLink *link, const char *reason);
void link_unreference(ProxycclLink *link);
void link_free(ProxycclLink *link);
void link_watch(ProxycclLink *link, uint32_t events); /* starts to watch the socket for events */
void link_wake(ProxycclLink *link);                   /* makes the thread watch the socket again */
void link_end_sending(ProxycclLink *link);            /* drops the rest of the frame that is being sent */
void request_end(Request *request);                   /* ends a request, unless it has ended */
int link_append(ProxycclLink *link, FrameKind kind, uint32_t count, const void *first, uint64_t first_bytes,
                const void *second, uint64_t second_bytes);

/* link_send.c */
/* Sends a message over a link or, if `link` is NULL, to the agent itself. Returns 0 or an errno. */
int agent_tell(ProxycclAgent *agent, ProxycclLink *link, const char *message, uint64_t bytes);
void link_send(ProxycclLink *link); /* sends until nothing is left to send or the socket is full */
/* Starts an inactive request: moves its blocks or, if `asked` is not NULL, sends a CHECK of the memory at `asked`. */
void link_start(ProxycclLink *link, Request *request, uint64_t bytes, const ProxycclFault *asked);
void link_forget(ProxycclLink *link, Request *request); /* cancels a request, and ends access to its local memory */
void links_feed(ProxycclAgent *agent);                  /* advances links' answers; called by the thread */
/* Stops a request whose local memory can't be read or written. The request ends when its last answer arrives. */
void request_refuse(ProxycclLink *link, Request *request, uint64_t block, const char *address);

/* link_receive.c */
void link_ready(ProxycclLink *link, uint32_t events);
void link_watched(ProxycclLink *link, uint32_t events); /* handles events; called by the thread */
void link_help(ProxycclLink *link);                     /* sends and receives for a caller that polls */
void link_look(ProxycclLink *link);                     /* ends the link if the peer has disconnected */

/* grants.c */
/* Counts a transfer of granted blocks as active. Returns 0, or ESTALE if a block is revoked. */
int grant_enter(const ProxycclGranted *granted);
/* Returns whether the next piece may be copied: a write stops when its grant is revoked. */
int grant_stands(const ProxycclTransfer *transfer);
/* Counts a transfer as ended. Returns whether no block was revoked before. */
int grant_leave(const ProxycclGranted *granted);

/* log.c */
void log_end(const ProxycclTransfer *transfer, ProxycclTransferState state);

/* transfer.c */
/* Creates a path's struct of `bytes` bytes. The caller does not hold the agent's lock. Returns NULL on failure and sets
 * errno. */
ProxycclTransfer *transfer_new(ProxycclAgent *agent, ProxycclLink *link, size_t bytes, const TransferPath *path);
ProxycclTransfer *transfer_of_blocks(ProxycclAgent *agent, ProxycclLink *link, size_t bytes, const TransferPath *path,
                                     const ProxycclBlocks *blocks);
/* Ends a transfer: as canceled if it is abandoned, as lost if its link is lost, otherwise with `state`. Frees an
 * orphaned transfer. */
void transfer_end(ProxycclTransfer *transfer, ProxycclTransferState state);
/* Ends a transfer with the result that the answers to its request report. */
void transfer_answered(Request *request);
/* Returns 1 if all registrations in the transfer's `guards` are valid. If one is invalid, sets the transfer's `fault`
 * to the first invalid registration, and returns 0. */
int transfer_stands(ProxycclTransfer *transfer);
/* Returns 1 if all registrations of the local memory of a request's transfer are valid. If one is invalid, sets the
 * request's `refusal` and `fault`, and returns 0. */
int request_stands(Request *request);
void transfer_end_deregistered(ProxycclTransfer *transfer); /* ends a transfer after transfer_stands has returned 0 */
void transfer_watch(ProxycclTransfer *transfer);            /* makes the thread poll the transfer */
int transfer_cancel(ProxycclTransfer *transfer, uint64_t timeout_ns); /* see proxyccl_transfer_cancel */
void transfers_look(ProxycclAgent *agent);            /* polls all transfers in the agent's list `looked_at` */
uint64_t transfers_pause(const ProxycclAgent *agent); /* returns the ns until the next poll */

/* The paths (copy_path.c, socket_path.c, fabric_path.c, device_path.c, staged_path.c) and thread.c come after these
 * files, and declare no functions here. */
