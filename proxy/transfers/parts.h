/* The structs of agents, links and transfers, which their files share. See transfers.h.
 *
 * One mutex, the agent's, protects all fields but those that are marked as atomic. Copies run without the mutex; each
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
  PIECE_BYTES = 1 << 20,     /* most bytes that a thread copies at once */
  SHORT_BYTES = 64 << 10,    /* the caller waits for a device's copy of at most this length */
  SHORT_NS = 20000,          /* … and for at most this time, which is less than waking a thread takes */
  SHORTEST_PAUSE_NS = 20000, /* the agent's thread pauses at least this long between two polls */
  ROW = 6,                   /* words of a request to libfabric: see proxyccl_transfer_create_by_fabric */
  LONGEST_CANCEL_S = 30,     /* a device or an adapter that takes longer is assumed to hang */
  FED = 2,                   /* most answers of one link that use a stage */
  LONGEST_ADDRESS = 512,     /* bytes of a libfabric endpoint's address */
  AHEAD_BYTES = 64 << 10,    /* most bytes that are read ahead from a socket */
  UNGREETED = 64             /* most accepted links that have not sent their greeting */
};

#define OUT_OF_MEMORY "this process is out of memory" /* why a link ends */

/* The tag of an epoll event: 0 for the eventfd, else a pointer, whose low alignment bits hold the kind of object. */
enum { TAG_LINK = 0, TAG_PROCESS = 1, TAG_LISTENER = 2, TAG_FABRIC = 3, TAG_BITS = 3 };

/* Registered memory: the ranges' first addresses in order, then for each range the highest end of all ranges up to this
 * one. */
typedef struct Ranges {
  uint64_t *bounds, count;
} Ranges;

/* A position in a list of blocks. */
typedef struct Position {
  uint64_t index, offset;
} Position;

/* Reads or writes of a peer's memory by libfabric. */
typedef struct Rdma {
  Node node; /* in the list of Rdmas with requests to post */
  ProxycclLink *link;
  int writes;
  const uint64_t *rows;             /* see proxyccl_transfer_create_by_fabric */
  uint64_t peer;                    /* an fi_addr_t */
  Position at;                      /* start of the data that is not posted */
  uint64_t left;                    /* bytes of that data */
  uint64_t unanswered;              /* posted requests without a completion */
  int error;                        /* the first failed request's error */
  uint64_t fault;                   /* the address, in the peer's process, of that request */
  int canceled;                     /* the agent stopped before the requests were complete */
  void (*ended)(struct Rdma *self); /* called after the last request; may free `self` */
} Rdma;

/* Memory through which a link serves a device's memory: one of the device's stages or, if all are in use, pageable
 * memory. */
typedef struct Stage {
  Node node; /* in the list of stages that a device copies */
  ProxycclAgent *agent;
  struct Device *device;
  uint32_t number; /* PROXYCCL_STAGES for pageable memory */
  char *memory;
  int copying;        /* a device or a libfabric request uses the stage */
  int status;         /* 0, the driver's status of a failed copy, or -1 */
  Rdma rdma;          /* the libfabric request of the stage */
  uint64_t row[ROW];  /* the row of that request */
  uint64_t turn;      /* number of the stage's copy */
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

/* The head of each frame on a socket. Both sides have the same byte order, which the greeting checks. HELLO: `count` is
 * the version, and `bytes` bytes follow, the secret and the sender's name. PERMIT: instead of the HELLO, and the only
 * frame of its connection: `count` is the version, and the secret follows. A PERMIT asks the receiver to let the
 * sender's process copy from and to the receiver's. MESSAGE: `bytes` bytes follow. WRITE, READ: `count` blocks
 * (address, bytes) of the receiver's memory follow, and after a WRITE's blocks its data. ADDRESS: `bytes` bytes
 * follow, the address of the sender's endpoint of libfabric. FETCH, STORE: like WRITE and READ, but the data does not
 * follow: by libfabric, the receiver reads it from the sender's memory, or writes it there. An Origin follows the
 * blocks. CHECK: `count` blocks follow. A CHECK asks whether these blocks are registered and mapped. ANSWER: one for
 * each WRITE, READ, FETCH, STORE, PERMIT and CHECK, in their order. `count` is an errno: EACCES if a block is not
 * registered, EFAULT if it is not mapped, EPERM if it is protected; `bytes` is then the block's number. Without an
 * error, `bytes` bytes of a READ's data follow, then a second head. The second head's errno is nonzero if blocks were
 * freed or deregistered meanwhile; the rest of the data was then zeros.
 */
typedef struct Frame {
  uint32_t kind, count;
  uint64_t bytes;
} Frame;

/* A peer's memory that is registered with libfabric. */
typedef struct Origin {
  uint64_t address, key;
} Origin;

/* Blocks to move, and how far they have been moved. A link moves them by frames, or sends a CHECK of one block. */
typedef struct Request {
  Node node; /* in the link's list of requests with frames to send */
  ProxycclTransfer *transfer;
  int active; /* whether the request is started on the link and has not ended */
  int writes;
  const struct iovec *local, *remote;
  uint64_t count;
  Position at;          /* start of the data that nothing has begun to move */
  uint64_t left;        /* bytes of that data */
  uint32_t unanswered;  /* unanswered frames */
  uint32_t refusal;     /* the first nonzero errno of an answer */
  int asks;             /* whether the request sends a CHECK of the memory at `fault`, after a failed copy */
  ProxycclFault fault;  /* the fault that the refusal names */
  const Origin *origin; /* where the peer reads or writes by libfabric; NULL if frames carry the data */
  void (*ended)(struct Request *self); /* called after the last answer, or when the link is lost */
} Request;

/* A frame that the peer has not answered. */
typedef struct Awaited {
  Request *request; /* NULL if the request was canceled */
  Position at;      /* position of the frame's first block in the request's lists */
  uint64_t bytes;   /* bytes of a READ's data; 0 for other frames */
} Awaited;

/* An answer that waits to be sent. */
typedef struct Answer {
  Node node; /* in the link's list of answers */
  uint32_t error;
  uint64_t bytes; /* bytes of a READ's data; after an error the number of the block */
  Device *device; /* the device whose memory a READ names; NULL for the host */
  Stage *stage;   /* the stage of a READ's or a WRITE's data; NULL without a stage, or before it has one */
  struct iovec staged;
  int by_fabric, fetches; /* whether the frame is a FETCH or a STORE; whether it is a FETCH */
  int steps;              /* begun steps of a FETCH or STORE; ANSWER_STEPS once all steps are done */
  Origin origin;
  uint64_t data; /* bytes of the data */
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
  void *own;            /* memory to free after the frame */
  Stage *stage;         /* the stage of an answer's data, or NULL */
  uint64_t memory;      /* the version of the agent's memory for which the blocks of an answer were checked */
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
  size_t have;  /* bytes of the head, or of the body */
  Stage *stage; /* the destination of a WRITE's data; NULL if data goes to the blocks */
  struct iovec staged;
  Buffer body;
  uint64_t body_bytes;        /* bytes of the whole body */
  const struct iovec *blocks; /* a WRITE's blocks, in `body`; NULL to discard the data */
  uint64_t count;
  Position at;
  uint64_t left;   /* bytes of data not received */
  uint32_t error;  /* the errno for a WRITE's answer */
  uint64_t block;  /* the number of the block with that error */
  uint64_t memory; /* see Sending.memory */
} Receiving;

struct ProxycclLink {
  ProxycclLink *next; /* in the agent's list of links */
  ProxycclAgent *agent;
  int socket, process; /* descriptors; -1 if closed or missing */
  int serves;          /* whether the peer opened the link */
  int greeted;         /* a serving link's greeting has arrived */
  int asked;           /* a PERMIT has arrived, after which the peer sends nothing */
  int addressed;       /* the address of the peer's endpoint has arrived */
  uint64_t address;    /* the address of the peer's endpoint, an fi_addr_t */
  const char *lost;    /* atomic: why the link ended; NULL while it works */
  uint32_t references; /* references of the handle, of transfers, and of stages that libfabric fills or empties */
  pid_t pid;           /* the peer's process; 0 if all data moves through the socket */
  char *name;          /* the peer's name, on a serving link */
  uint32_t name_bytes;
  int writable;    /* the thread watches the socket for room */
  int helped;      /* a caller has polled the socket since the thread did */
  int resting;     /* the thread leaves the socket to callers */
  Buffer messages; /* frames to send before the next frame with data */
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

/* The registrations of one side of a transfer: proxyccl_transfer_guard. */
typedef struct Guard {
  const uint64_t *ledger, *rows; /* NULL if the peer itself checks the blocks */
  uint64_t count;
  uint64_t seen; /* word 0 of the ledger at the last successful check; UINT64_MAX before the first check */
} Guard;

/* The functions by which one kind of transfer moves its data. Each path has its own file and a struct that begins with
 * a ProxycclTransfer. All functions are called with the agent locked; those that copy unlock it during the copy. */
typedef struct TransferPath {
  /* Begins a transfer that has bytes to move and a live link. `stream` is NULL unless a device copies. */
  void (*begin)(ProxycclTransfer *self, const uint64_t *stream);
  /* Advances a transfer in the agent's list `looked_at`, without waiting. Returns 1 on progress. NULL if transfers of
   * this path leave that list once their stream has reached them. */
  int (*look)(ProxycclTransfer *self);
  /* Copies a piece that no thread has begun. Returns 0 if there is no such piece, or no free stage, else 1. NULL if
   * threads do not copy. */
  int (*copy)(ProxycclTransfer *self);
  /* The work of a caller that polls the transfer while its request is not active. NULL if `copy` or `look` does this
   * work. */
  void (*help)(ProxycclTransfer *self);
  /* Begins no further work and waits for quiescence of the local memory. Returns 1, or 0 on a time-out. Called while
   * the transfer's request is not active. NULL if no work remains at that point. */
  int (*finish)(ProxycclTransfer *self, uint64_t timeout_ns);
  /* Called for a transfer in the agent's list `copies` when its link is lost. */
  void (*lose)(ProxycclTransfer *self);
  int silent; /* no event wakes waiting callers, so they poll */
  int soon;   /* the agent's thread polls again soon, however long the transfer takes */
} TransferPath;

struct ProxycclTransfer {
  Node node; /* in one of the agent's lists */
  const TransferPath *path;
  ProxycclAgent *agent;
  ProxycclLink *link; /* NULL for a transfer within the agent */
  int writes;
  uint64_t blocks, bytes;
  /* The blocks that a link or threads move. After a failed copy or request to libfabric, asks the peer whether its
   * memory is still mapped. */
  Request request;
  ProxycclTransferState state; /* atomic */
  int error;
  int copying; /* number of threads that copy a piece or poll the device */
  int cancel;
  int abandoned;   /* the transfer ends as canceled once nothing accesses its memory */
  int orphaned;    /* the canceled transfer is freed at its end */
  Guard guards[2]; /* registrations of the local and of the remote side */
  ProxycclFault fault;
  uint64_t *words; /* the words shared with its stream, or NULL */
  int rung;        /* whether the stream has reached the transfer */
  Buffer message;
  int has_message;
  ProxycclTransferTimes times;
  uint32_t label;
};

struct ProxycclAgent {
  pthread_mutex_t lock;
  pthread_cond_t changed; /* a transfer ended, a message came, a copy stopped, the agent stopped */
  pthread_t thread;
  int epoll, wake;
  int spare; /* a spare descriptor, which is closed to accept and refuse a link when descriptors have run out */
  int *listeners;
  uint32_t listener_count;
  int stopped;
  uint32_t resting;    /* number of resting links */
  uint32_t references; /* references of the handle, links and transfers */
  char *name;
  char secret[PROXYCCL_SECRET_BYTES];
  int copied; /* peers may copy from and to this process */
  int losses; /* an eventfd to signal when links are lost */
  ProxycclLink *links;
  Queue copies;    /* transfers whose pieces threads copy, in turn */
  Queue looked_at; /* transfers of devices and streams to poll, in turn */
  Buffer inbox;
  size_t read;              /* bytes of the inbox that are read */
  uint64_t unread;          /* atomic: unread bytes of the inbox */
  ProxycclTransferLog *log; /* NULL: none */
  struct Fabric *fabric;    /* NULL without a libfabric endpoint */
  Ranges host;
  Device *devices;
  uint64_t memory;     /* the registered memory's version */
  Queue stages;        /* stages that a device copies, in turn */
  int starved;         /* an answer waits for a stage */
  int waits_for_stage; /* the thread waits for a stage, to copy a transfer's next piece */
  int feeds;           /* serving links may continue their answers */
  uint64_t turns;
};

/* The functions of the files. Each file calls only those above it. */

/* guard.c, whose functions are called without the lock. */
/* Installs the process's fault handler unless it is the newest. Returns 0 or an errno. */
int guard_install(void);
/* Removes the fault signals from a set of blocked signals: the kernel ends a process that faults while blocking them.
 */
void guard_admit(sigset_t *blocked);
/* Copies blocks of equal lengths, `bytes` in all, as memmove does, between memory of which the program may have freed
 * some. Returns the bytes before the first inaccessible byte, or all. */
uint64_t guard_copy(const struct iovec *to, const struct iovec *from, uint64_t count, uint64_t bytes);

/* blocks.c */
/* Gets the blocks' data after a position, as at most `most_parts` parts. Returns the bytes of these parts. */
uint64_t blocks_parts(const struct iovec *blocks, uint64_t count, Position at, uint64_t most_bytes, uint32_t most_parts,
                      struct iovec *parts, uint32_t *part_count);
void blocks_advance(const struct iovec *blocks, Position *at, uint64_t bytes);
int is_mapped(const void *address); /* whether this process has the address mapped */

/* driver.c, whose functions are called without the lock. They return the driver's statuses. */
/* The calling thread's state before it used a device. */
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
int staging_reached(const ProxycclStaging *staging, uint32_t stage); /* queries the stage's event */
int staging_await(const ProxycclStaging *staging, uint32_t stage);   /* waits for the stage's event, at most 30 s */

/* agent.c. All functions below are called with the agent locked. */
int agent_watch(ProxycclAgent *agent, int descriptor, uintptr_t tag, int operation, uint32_t events); /* 0 or errno */
void agent_wake(ProxycclAgent *agent);
struct timespec agent_deadline(uint64_t timeout_ns);
void agent_unreference(ProxycclAgent *agent); /* unlocks */
void agent_free(ProxycclAgent *agent);
int agent_receive(ProxycclAgent *agent, const char *name, uint64_t name_bytes, const char *message, uint64_t bytes);
/* Returns the number of the first block that is not registered, or is of another kind of memory than the first block,
 * or `count` if there is none. Sets `device` to the first block's device, or NULL. */
uint64_t agent_lacks(const ProxycclAgent *agent, const struct iovec *blocks, uint64_t count, Device **device);

/* fabric.c */
void rdma_start(ProxycclAgent *agent, Rdma *rdma, uint64_t bytes);
void rdma_drop(ProxycclAgent *agent, Rdma *rdma);                         /* drops the requests that are not posted */
int fabric_know(ProxycclLink *link, const void *address, uint64_t bytes); /* 0 if the provider refuses */
void fabric_forget(ProxycclLink *link);
int fabric_failed(const ProxycclAgent *agent); /* returns 1 if the completion queue has failed */
void fabric_poll(ProxycclAgent *agent);
uint64_t fabric_rest(ProxycclAgent *agent); /* ns until the thread must poll again; UINT64_MAX if an event wakes it */
void fabric_lose(ProxycclLink *link);       /* the link is lost */
/* Waits a second for posted requests, and ends the rest: the endpoint is closed before their memory is reused. */
void fabric_stop(ProxycclAgent *agent);

/* stages.c. Called by the agent's thread. */
Stage *stage_take(ProxycclLink *link, Device *device); /* NULL if out of memory */
/* Returns NULL if no stage is free, and sets `feeds` once a stage is. */
Stage *stage_take_pinned(ProxycclLink *link, Device *device);
void stage_give(Stage *stage); /* releases a stage that its link no longer needs */
void stage_copy(Stage *stage, int to_device, const struct iovec *blocks, uint64_t count); /* unlocks during the call */
/* Reads the stage's data from a peer's memory, or writes it there, by libfabric. */
void stage_carry(Stage *stage, int writes, uint64_t bytes, const Origin *origin);
void stages_look(ProxycclAgent *agent);   /* unlocks during the call; sets `feeds` if copies have ended */
void stages_finish(ProxycclAgent *agent); /* waits for all copies; the thread has ended */

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
/* Stops a request whose local memory can't be read or written. The request ends with its last answer. */
void request_refuse(ProxycclLink *link, Request *request, uint64_t block, const char *address);

/* link_receive.c */
void link_ready(ProxycclLink *link, uint32_t events);
void link_watched(ProxycclLink *link, uint32_t events); /* handles events; called by the thread */
void link_help(ProxycclLink *link);                     /* sends and receives for a caller that polls */
void link_look(ProxycclLink *link); /* polls the socket for a disconnect, and loses the link if so */

/* log.c */
void log_end(const ProxycclTransfer *transfer, ProxycclTransferState state);

/* transfer.c */
/* Creates the struct of a path, of `bytes` bytes, unlocked. Returns NULL on failure and sets errno. */
ProxycclTransfer *transfer_new(ProxycclAgent *agent, ProxycclLink *link, size_t bytes, const TransferPath *path);
ProxycclTransfer *transfer_of_blocks(ProxycclAgent *agent, ProxycclLink *link, size_t bytes, const TransferPath *path,
                                     const ProxycclBlocks *blocks);
/* Ends a transfer: as canceled if it is abandoned, as lost if its link is lost. Frees the transfer if it is orphaned.
 */
void transfer_end(ProxycclTransfer *transfer, ProxycclTransferState state);
/* Ends a transfer with the result that the answers to the frames or the CHECK of its request report. */
void transfer_answered(Request *request);
/* Whether all registrations of a transfer's blocks are valid, as far as this process can tell. Otherwise sets `fault`
 * to an ended registration.
 */
int transfer_stands(ProxycclTransfer *transfer);
void transfer_end_deregistered(ProxycclTransfer *transfer); /* ends a transfer of which a registration has ended */
void transfer_watch(ProxycclTransfer *transfer);            /* makes the thread poll the transfer */
int transfer_cancel(ProxycclTransfer *transfer, uint64_t timeout_ns); /* see proxyccl_transfer_cancel */
void transfers_look(ProxycclAgent *agent);                            /* polls all transfers in `looked_at` */
uint64_t transfers_pause(const ProxycclAgent *agent);                 /* ns until the next poll */

/* The paths: copy_path.c, socket_path.c, fabric_path.c, device_path.c, staged_path.c. Then thread.c. */

#endif
