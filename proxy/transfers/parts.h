/* The structs of agents, links and transfers, and the functions, that the C files of this directory share. See
 * transfers.h.
 *
 * The agent's mutex protects all fields except those that are described as atomic. Copies run without the mutex; each
 * transfer counts its running copies.
 */
#ifndef PROXYCCL_TRANSFER_PARTS_H
#define PROXYCCL_TRANSFER_PARTS_H

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
  FRAME_BYTES = 512 << 10,   /* most data of one frame */
  WINDOW = 16,               /* most unanswered frames of one link */
  VERSION = 2,               /* version of the frames */
  TURN_BYTES = 2 << 20,      /* most bytes that a link sends or receives in its turn */
  PIECE_BYTES = 1 << 20,     /* most bytes of one piece of a copy */
  SHORT_BYTES = 64 << 10,    /* a caller waits for the end of a device's copy of at most this length */
  SHORT_NS = 20000,          /* it waits at most this long, which is less than waking a thread takes */
  SHORTEST_PAUSE_NS = 20000, /* the agent's thread pauses at least this long between two polls */
  ROW = 6,                   /* words that describe a libfabric request: see proxyccl_transfer_create_by_fabric */
  LONGEST_CANCEL_S = 30,     /* a device or a network adapter that takes longer is assumed to hang */
  FED = 2,                   /* most answers of one link that use stages at the same time */
  LONGEST_ADDRESS = 512,     /* most bytes of a libfabric endpoint's address */
  AHEAD_BYTES = 64 << 10,    /* most bytes that are read ahead from a socket */
  UNGREETED = 64             /* most accepted links that have not sent their greeting */
};

#define OUT_OF_MEMORY "this process is out of memory" /* a reason for the end of a link */

/* The tag of an epoll event: 0 for the eventfd, else a pointer, whose low alignment bits hold the kind of object. */
enum { TAG_LINK = 0, TAG_PROCESS = 1, TAG_LISTENER = 2, TAG_FABRIC = 3, TAG_BITS = 3 };

/* Ranges of registered memory. `bounds` has the ranges' first addresses in ascending order, and then for each range the
 * highest end of this range and all ranges before it. */
typedef struct Ranges {
  uint64_t *bounds, count;
} Ranges;

/* A position in a list of blocks. */
typedef struct Position {
  uint64_t index, offset;
} Position;

/* A list of reads or of writes of a peer's memory by libfabric. */
typedef struct Rdma {
  Node node; /* in the list of Rdmas with requests to post */
  ProxycclLink *link;
  int writes;
  const uint64_t *rows;             /* see proxyccl_transfer_create_by_fabric */
  uint64_t peer;                    /* an fi_addr_t */
  Position at;                      /* start of the data that is not posted */
  uint64_t left;                    /* bytes of that data */
  uint64_t unanswered;              /* number of posted requests without a completion */
  int error;                        /* the error of the first request that failed */
  uint64_t fault;                   /* the peer's address that the first failed request accessed */
  int canceled;                     /* whether the agent stopped before the requests were complete */
  void (*ended)(struct Rdma *self); /* called after the last request; may free `self` */
} Rdma;

/* A buffer through which a link serves requests for a device's memory: one of the device's pinned stages or, if all are
 * in use, pageable memory. */
typedef struct Stage {
  Node node; /* in the list of stages that a device copies */
  ProxycclAgent *agent;
  struct Device *device;
  uint32_t number; /* PROXYCCL_STAGES for pageable memory */
  char *memory;
  int copying;        /* whether a device's copy or a libfabric request uses the stage */
  int status;         /* 0; the driver's status of a failed copy; -1 if a libfabric request failed */
  Rdma rdma;          /* the libfabric request of the stage */
  uint64_t row[ROW];  /* the row of that request */
  uint64_t turn;      /* number of the stage's last copy by the device, which counts the agent's copies */
  ProxycclLink *link; /* NULL if the link is lost */
} Stage;

/* A device whose memory peers reach through sockets. */
typedef struct Device {
  struct Device *next;
  const ProxycclStaging *staging;
  Ranges ranges;
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

/* The head of each frame on a socket. Both sides must have the same byte order, which the greeting checks. HELLO, the
 * greeting: `count` is the version, and the secret and the sender's name follow, `bytes` bytes together. PERMIT: sent
 * instead of a HELLO, as the only frame of its connection. `count` is the version, and the secret follows. A PERMIT
 * asks the receiver to let the sender's process copy from and to the receiver's process. MESSAGE: the text follows,
 * `bytes` bytes. WRITE, READ: `count` blocks (address, bytes) of the receiver's memory follow, and after a WRITE's
 * blocks the data. ADDRESS: the address of the sender's libfabric endpoint follows, `bytes` bytes. FETCH, STORE: like
 * WRITE and READ, but the data is not in frames: by libfabric, the receiver reads a FETCH's data from the sender's
 * memory, and writes a STORE's data to it. An Origin, which names that memory, follows the blocks. CHECK: `count`
 * blocks follow. A CHECK asks whether these blocks are registered and mapped. ANSWER: sent for each WRITE, READ, FETCH,
 * STORE, PERMIT and CHECK, in their order. `count` is an errno: EACCES if a block is not registered, EFAULT if it is
 * not mapped, EPERM if it is protected; `bytes` is then the block's number. If the answer to a READ has no error,
 * `bytes` bytes of data follow, then a second head. The errno in the second head is nonzero if blocks were freed or
 * deregistered while the data was sent; the rest of the data is then zeros.
 */
typedef struct Frame {
  uint32_t kind, count;
  uint64_t bytes;
} Frame;

/* Memory of a peer that is registered with libfabric: the address and key by which requests name it. */
typedef struct Origin {
  uint64_t address, key;
} Origin;

/* A list of blocks for a link to move in frames, and how far it has been moved. Alternatively, a request for the link
 * to send a CHECK of one block. */
typedef struct Request {
  Node node; /* in the link's list of requests with frames to send */
  ProxycclTransfer *transfer;
  int active; /* whether the request is started on the link and has not ended */
  int writes;
  const struct iovec *local, *remote;
  uint64_t count;
  Position at;          /* start of the data whose move has not begun */
  uint64_t left;        /* bytes of that data */
  uint32_t unanswered;  /* number of unanswered frames */
  uint32_t refusal;     /* the first nonzero errno of an answer */
  int asks;             /* whether the request sends a CHECK of the memory at `fault`, after a failed copy */
  ProxycclFault fault;  /* the fault that the refusal reports */
  const Origin *origin; /* where the peer reads or writes by libfabric; NULL if frames carry the data */
  void (*ended)(struct Request *self); /* called after the last answer, or when the link is lost */
} Request;

/* A frame that the peer has not answered. */
typedef struct Awaited {
  Request *request; /* the frame's request; NULL if it was canceled */
  Position at;      /* position of the frame's first block in the request's lists */
  uint64_t bytes;   /* bytes of a READ's data; 0 for other frames */
} Awaited;

/* An answer that waits to be sent. */
typedef struct Answer {
  Node node; /* in the link's list of answers */
  uint32_t error;
  uint64_t bytes; /* bytes of a READ's data; after an error, the number of the block that caused it */
  Device *device; /* the device whose memory the request names; NULL for host memory */
  Stage *stage;   /* the stage for the request's data; NULL if no stage is needed or none is assigned yet */
  struct iovec staged;
  int by_fabric, fetches; /* whether the request is a FETCH or a STORE; whether it is a FETCH */
  int steps; /* number of steps of a FETCH or STORE that have begun; ANSWER_STEPS once all steps are done */
  Origin origin;
  uint64_t data; /* bytes of a FETCH's or STORE's data */
  uint64_t count;
  struct iovec blocks[]; /* the blocks of a READ, a FETCH or a STORE */
} Answer;

/* The frame that is being sent: a head, data from blocks, and the second head of an answer. */
typedef struct Sending {
  Buffer head;
  size_t sent; /* bytes of the head that are sent */
  const struct iovec *blocks;
  uint64_t count;
  Position at;
  uint64_t left;        /* bytes of data not sent */
  Request *request;     /* the request that owns the blocks; NULL for an answer or messages */
  const Answer *answer; /* the answer that owns the blocks; NULL if `own` holds the data */
  void *own;            /* memory to free once the frame is sent, or NULL */
  Stage *stage;         /* the stage of an answer's data, or NULL */
  uint64_t memory;      /* the value of the agent's `memory` when the blocks of the answer were last checked */
  Frame tail;           /* the second head, after the data of an answer */
  size_t tail_left;     /* bytes of `tail` that are not sent */
} Sending;

/* The parts of a frame, in their order. */
typedef enum FramePart { IN_HEAD, IN_BODY, IN_DATA, IN_TAIL } FramePart;

/* The frame that is being received: a head, a body that the link stores, data for blocks, and the second head of an
 * answer with data. */
typedef struct Receiving {
  Frame frame; /* the head, or the second head */
  FramePart part;
  size_t have;  /* bytes of the head, or of the body, that have arrived */
  Stage *stage; /* the stage that receives a WRITE's data; NULL if the data goes directly to the blocks */
  struct iovec staged;
  Buffer body;
  uint64_t body_bytes;        /* bytes of the whole body */
  const struct iovec *blocks; /* a WRITE's blocks, in `body`; NULL to discard the data */
  uint64_t count;
  Position at;
  uint64_t left;   /* bytes of data not received */
  uint32_t error;  /* the errno for the answer to a WRITE */
  uint64_t block;  /* the number of the block with that error */
  uint64_t memory; /* see Sending.memory */
} Receiving;

struct ProxycclLink {
  ProxycclLink *next; /* in the agent's list of links */
  ProxycclAgent *agent;
  int socket, process; /* the link's socket and the peer's pidfd; -1 if closed or missing */
  int serves;          /* whether the peer opened the link */
  int greeted;         /* whether the greeting of a link that the peer opened has arrived */
  int asked;           /* whether a PERMIT has arrived, after which the peer sends nothing */
  int addressed;       /* whether the address of the peer's libfabric endpoint has arrived */
  uint64_t address;    /* that address, as an fi_addr_t */
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
  Queue requests; /* requests with frames to send, which take turns */
  Awaited awaited[WINDOW];
  uint32_t oldest, unanswered;
  Queue answers;
  uint32_t answer_count;
  char *ahead; /* AHEAD_BYTES of memory for data that was read ahead */
  size_t ahead_at, ahead_end;
};

/* The registrations of a transfer's local or remote blocks: see proxyccl_transfer_guard. */
typedef struct Guard {
  const uint64_t *ledger, *rows; /* NULL if only the peer checks the blocks */
  uint64_t count;
  uint64_t seen; /* word 0 of the ledger at the last successful check; UINT64_MAX before the first check */
} Guard;

/* The functions by which one kind of transfer moves its data. Each path has its own file, and a struct that begins with
 * a ProxycclTransfer. All functions are called with the agent locked; functions that copy unlock the agent during the
 * copy. */
typedef struct TransferPath {
  /* Begins a transfer that has bytes to move and a live link. `stream` is NULL unless a device copies. */
  void (*begin)(ProxycclTransfer *self, const uint64_t *stream);
  /* Advances a transfer in the agent's list `looked_at`, without waiting. Returns 1 if the transfer has advanced. NULL
   * if transfers of this path are in that list only until their stream has started them. */
  int (*look)(ProxycclTransfer *self);
  /* Copies a piece that no thread has begun. Returns 0 if there is no such piece, or no free stage, else 1. NULL if
   * threads copy nothing on this path. */
  int (*copy)(ProxycclTransfer *self);
  /* Advances the transfer for a caller that polls it, while its request is not active. NULL if `copy` or `look` does
   * this work. */
  void (*help)(ProxycclTransfer *self);
  /* Ends the path's work for a cancel: begins no further work, and waits until nothing accesses the local memory.
   * Returns 1, or 0 on a time-out. Called only if the transfer's request is not active. NULL if no work remains
   * then. */
  int (*finish)(ProxycclTransfer *self, uint64_t timeout_ns);
  /* Called for a transfer in the agent's list `copies` when its link is lost. */
  void (*lose)(ProxycclTransfer *self);
  int silent; /* whether waiting callers must poll, because no event wakes them */
  int soon;   /* whether the agent's thread polls at the shortest interval, even if the transfer takes long */
} TransferPath;

struct ProxycclTransfer {
  Node node; /* in at most one of the agent's lists */
  const TransferPath *path;
  ProxycclAgent *agent;
  ProxycclLink *link; /* NULL for a transfer within the agent */
  int writes;
  uint64_t blocks, bytes;
  /* The blocks that a link or threads move. After a failed copy or libfabric request, this request instead asks the
   * peer whether its memory is still mapped. */
  Request request;
  ProxycclTransferState state; /* atomic */
  int error;
  int copying; /* number of threads that copy a piece, poll the device, or wait in `finish` */
  int cancel;
  int abandoned;   /* whether a cancel has timed out: the transfer ends as canceled once nothing accesses its memory */
  int orphaned;    /* whether the canceled transfer is freed at its end, because its handle is released */
  Guard guards[2]; /* registrations of the local blocks and of the remote blocks */
  ProxycclFault fault;
  uint64_t *words; /* the words shared with the stream that starts the transfer, or NULL */
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
  int spare; /* a spare descriptor: when descriptors have run out, it is closed, so that a link can be accepted and
                refused */
  int *listeners;
  uint32_t listener_count;
  int stopped;
  uint32_t resting;    /* number of links whose `resting` is set */
  uint32_t references; /* number of references: from the handle, links and transfers */
  char *name;
  char secret[PROXYCCL_SECRET_BYTES];
  int copied; /* whether peers may copy from and to this process */
  int losses; /* an eventfd to signal when links are lost */
  ProxycclLink *links;
  Queue copies;    /* transfers that threads copy piece by piece, in turn */
  Queue looked_at; /* transfers to poll in turn, which a device advances or a stream starts */
  Buffer inbox;
  size_t read;              /* number of leading bytes of the inbox that have been read */
  uint64_t unread;          /* atomic: unread bytes of the inbox */
  ProxycclTransferLog *log; /* NULL if no transfers are recorded */
  struct Fabric *fabric;    /* NULL without a libfabric endpoint */
  Ranges host;
  Device *devices;
  uint64_t memory;     /* version of the registered ranges, which counts their changes */
  Queue stages;        /* stages that a device copies, in turn */
  int starved;         /* whether an answer waits for a stage */
  int waits_for_stage; /* whether the thread waits for a stage, to copy a transfer's next piece */
  int feeds;           /* whether links may have answers to advance */
  uint64_t turns;
};

/* The functions of the files, in the files' order. Each file calls only functions of files above it. */

/* guard.c, whose functions are called without the lock. */
/* Installs this library's fault handler, unless it is the process's current one. Returns 0 or an errno. */
int guard_install(void);
/* Removes the fault signals from a set of signals to block: the kernel ends a process if a thread that blocks these
 * signals faults.
 */
void guard_admit(sigset_t *blocked);
/* Copies blocks with equal lengths on both sides, `bytes` bytes in all, as memmove does. The program may have freed
 * some of their memory. Returns the number of bytes before the first inaccessible byte, or `bytes`. */
uint64_t guard_copy(const struct iovec *to, const struct iovec *from, uint64_t count, uint64_t bytes);

/* blocks.c */
/* Gets the blocks' memory from a position on, as at most `most_parts` parts of at most `most_bytes` bytes in all.
 * Returns the bytes of these parts. */
uint64_t blocks_parts(const struct iovec *blocks, uint64_t count, Position at, uint64_t most_bytes, uint32_t most_parts,
                      struct iovec *parts, uint32_t *part_count);
void blocks_advance(const struct iovec *blocks, Position *at, uint64_t bytes);
int is_mapped(const void *address); /* whether this process has the address mapped */

/* driver.c, whose functions are called without the lock. They return the driver's statuses. */
/* The calling thread's state before driver_enter, for driver_leave to restore. */
typedef struct Entered {
  uint64_t context;
  int mode;
} Entered;
/* Makes the device current, and allows calls that a graph capture elsewhere in the process forbids. */
Entered driver_enter(const ProxycclCopier *copier);
void driver_leave(const ProxycclCopier *copier, Entered before);
/* Queues copies between a stage's memory and a device's blocks, and records the stage's event. */
int staging_queue(const ProxycclStaging *staging, uint32_t stage, void *memory, int to_device,
                  const struct iovec *blocks, uint64_t count);
int staging_reached(const ProxycclStaging *staging, uint32_t stage); /* queries the event; returns its status */
int staging_await(const ProxycclStaging *staging, uint32_t stage);   /* waits for the stage's event, at most 30 s */

/* agent.c. All functions below are called with the agent locked. */
int agent_watch(ProxycclAgent *agent, int descriptor, uintptr_t tag, int operation, uint32_t events); /* 0 or errno */
void agent_wake(ProxycclAgent *agent);
struct timespec agent_deadline(uint64_t timeout_ns);
void agent_unreference(ProxycclAgent *agent); /* unlocks */
void agent_free(ProxycclAgent *agent);
int agent_receive(ProxycclAgent *agent, const char *name, uint64_t name_bytes, const char *message, uint64_t bytes);
/* Returns the number of the first block that is not registered or that is in another device's (or the host's) memory
 * than the first block; `count` if there is no such block. Sets `device` to the first block's device, or NULL for host
 * memory. */
uint64_t agent_lacks(const ProxycclAgent *agent, const struct iovec *blocks, uint64_t count, Device **device);

/* fabric.c */
void rdma_start(ProxycclAgent *agent, Rdma *rdma, uint64_t bytes);
void rdma_drop(ProxycclAgent *agent, Rdma *rdma);                         /* drops the requests that are not posted */
int fabric_know(ProxycclLink *link, const void *address, uint64_t bytes); /* records a peer's address; 0 on failure */
void fabric_forget(ProxycclLink *link);
int fabric_failed(const ProxycclAgent *agent); /* returns 1 if the completion queue has failed */
void fabric_poll(ProxycclAgent *agent);
uint64_t fabric_rest(ProxycclAgent *agent); /* ns until the thread must poll again; UINT64_MAX if an event wakes it */
void fabric_lose(ProxycclLink *link);       /* the link is lost */
/* Waits at most a second for posted requests, and then ends the rest without a completion: their memory is not reused
 * before the endpoint is closed. */
void fabric_stop(ProxycclAgent *agent);

/* stages.c. Called by the agent's thread. */
Stage *stage_take(ProxycclLink *link, Device *device); /* NULL if out of memory */
/* Returns NULL if no stage is free; `feeds` is then set once a stage is free. */
Stage *stage_take_pinned(ProxycclLink *link, Device *device);
void stage_give(Stage *stage); /* releases a stage that its link no longer needs */
void stage_copy(Stage *stage, int to_device, const struct iovec *blocks, uint64_t count); /* unlocks during the call */
/* Copies by libfabric: from the stage to a peer's memory if `writes`, else from the peer's memory to the stage. */
void stage_carry(Stage *stage, int writes, uint64_t bytes, const Origin *origin);
void stages_look(ProxycclAgent *agent);   /* unlocks during the call; sets `feeds` if copies have ended */
void stages_finish(ProxycclAgent *agent); /* waits for all copies; called after the thread has ended */

/* link.c */
ProxycclLink *link_new(ProxycclAgent *agent, int socket, int process, int serves);
void link_lose(ProxycclLink *link, const char *reason);
void link_unreference(ProxycclLink *link);
void link_free(ProxycclLink *link);
void link_watch(ProxycclLink *link, uint32_t events); /* starts to watch the socket for events */
void link_wake(ProxycclLink *link);                   /* returns the socket to the thread */
void link_end_sending(ProxycclLink *link);            /* drops the rest of the frame that is being sent */
void request_end(Request *request);                   /* ends a request, unless it has ended */
int link_append(ProxycclLink *link, FrameKind kind, uint32_t count, const void *first, uint64_t first_bytes,
                const void *second, uint64_t second_bytes);

/* link_send.c */
void link_send(ProxycclLink *link); /* sends until nothing is left to send or the socket is full */
/* Starts a request that is not active: to move its blocks' bytes or, if `asked` is not NULL, to CHECK the memory at
 * `asked`.
 */
void link_start(ProxycclLink *link, Request *request, uint64_t bytes, const ProxycclFault *asked);
void link_forget(ProxycclLink *link, Request *request); /* afterwards nothing accesses the request's local memory */
void links_feed(ProxycclAgent *agent);                  /* advances links' answers; called by the thread */
/* Stops a request whose local memory can't be read or written. The request ends when its last answer arrives. */
void request_refuse(ProxycclLink *link, Request *request, uint64_t block, const char *address);

/* link_receive.c */
void link_ready(ProxycclLink *link, uint32_t events);
void link_watched(ProxycclLink *link, uint32_t events); /* handles events; called by the thread */
void link_help(ProxycclLink *link);                     /* sends and receives for a caller that polls */
void link_look(ProxycclLink *link); /* polls the socket for a disconnect, and ends the link after one */

/* log.c */
void log_end(const ProxycclTransfer *transfer, ProxycclTransferState state);

/* transfer.c */
/* Creates a path's struct of `bytes` bytes. Called without the lock. Returns NULL on failure and sets errno. */
ProxycclTransfer *transfer_new(ProxycclAgent *agent, ProxycclLink *link, size_t bytes, const TransferPath *path);
ProxycclTransfer *transfer_of_blocks(ProxycclAgent *agent, ProxycclLink *link, size_t bytes, const TransferPath *path,
                                     const ProxycclBlocks *blocks);
/* Ends a transfer: as canceled if it is abandoned, as lost if its link is lost. Frees the transfer if it is orphaned.
 */
void transfer_end(ProxycclTransfer *transfer, ProxycclTransferState state);
/* Ends a transfer with the result that the answers to its request's frames, or to its CHECK, report. */
void transfer_answered(Request *request);
/* Returns 1 if all registrations of a transfer's blocks are valid, as far as this process can tell. Otherwise sets the
 * transfer's `fault` to one that has ended, and returns 0.
 */
int transfer_stands(ProxycclTransfer *transfer);
void transfer_end_deregistered(ProxycclTransfer *transfer);           /* ends a transfer with an ended registration */
void transfer_watch(ProxycclTransfer *transfer);                      /* makes the thread poll the transfer */
int transfer_cancel(ProxycclTransfer *transfer, uint64_t timeout_ns); /* see proxyccl_transfer_cancel */
void transfers_look(ProxycclAgent *agent);            /* polls all transfers in the agent's list `looked_at` */
uint64_t transfers_pause(const ProxycclAgent *agent); /* returns the ns until the next poll */

/* The order continues with the paths (copy_path.c, socket_path.c, fabric_path.c, device_path.c, staged_path.c) and then
 * thread.c, which declare no functions here. */

#endif
