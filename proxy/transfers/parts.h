/* The structs of agents, links and transfers, which their files share. See transfers.h.
 *
 * One mutex, the agent's, protects everything here but words that are marked as atomic. Copies run without it; their
 * number is kept.
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
  WINDOW = 16,               /* most frames of one link that are not answered */
  PIECE_BYTES = 1 << 20,     /* most that a thread copies at once */
  SHORT_BYTES = 64 << 10,    /* a device's copy up to this is waited for by whoever starts it, … */
  SHORT_NS = 20000,          /* … at most this long: it takes less than waking a thread */
  SHORTEST_PAUSE_NS = 20000, /* between two looks of the agent's thread */
  ROW = 6,                   /* words of a request to libfabric: see proxyccl_transfer_create_by_fabric */
  LONGEST_CANCEL_S = 30,     /* a device or an adapter that takes longer hangs */
  FED = 2,                   /* most answers of one link that have a stage */
  LONGEST_ADDRESS = 512,     /* of an endpoint of libfabric */
  AHEAD_BYTES = 64 << 10,    /* read from a socket at once */
  UNGREETED = 64             /* most accepted links that have not sent their greeting */
};

/* The tag of an event: 0 for the eventfd, else a pointer, with its kind in the bits that alignment leaves free. */
enum { TAG_LINK = 0, TAG_PROCESS = 1, TAG_LISTENER = 2, TAG_FABRIC = 3, TAG_BITS = 3 };

/* Registered memory: first addresses in order, then for each the highest end of the ranges up to it. */
typedef struct Ranges {
  uint64_t *bounds, count;
} Ranges;

/* A place in a list of blocks. */
typedef struct Position {
  uint64_t index, offset;
} Position;

/* Reads or writes of a peer's memory by libfabric. */
typedef struct Rdma {
  Node node; /* of those with requests to be posted */
  ProxycclLink *link;
  int writes;
  const uint64_t *rows;             /* see proxyccl_transfer_create_by_fabric */
  uint64_t peer;                    /* an fi_addr_t */
  Position at;                      /* of what is not posted, … */
  uint64_t left;                    /* … its bytes */
  uint64_t unanswered;              /* requests that are posted */
  int error;                        /* of the first that failed, … */
  uint64_t fault;                   /* … and the peer's address of its data */
  int canceled;                     /* the agent was stopped first */
  void (*ended)(struct Rdma *self); /* after its last request, or when the rest was dropped; it may be freed */
} Rdma;

/* Memory by way of which a link serves a device's memory: one of the device's stages, or, if all are in use, memory
 * that is not pinned. */
typedef struct Stage {
  Node node; /* of those that a device copies */
  ProxycclAgent *agent;
  struct Device *device;
  uint32_t number; /* PROXYCCL_STAGES: not pinned */
  char *memory;
  int copying;        /* by a device, or by a request to libfabric */
  int status;         /* the driver's, of copies that failed, or -1 */
  Rdma rdma;          /* that request, … */
  uint64_t row[ROW];  /* … and its row */
  uint64_t turn;      /* of its copy */
  ProxycclLink *link; /* NULL: lost */
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

/* The head of each frame on a socket. Both sides have the same byte order, as the greeting finds out.
 * HELLO: `count` is the version, and `bytes` bytes follow, the secret and the sender's name.
 * PERMIT: instead of the HELLO, and the only frame of its connection: `count` is the version, and the secret follows.
 * It asks to let the sender's process copy from and to the receiver's, and is answered. MESSAGE: `bytes` bytes follow.
 * WRITE, READ: `count` blocks (address, bytes) of the receiver's memory follow; after those of WRITE their data.
 * ADDRESS: `bytes` bytes follow, the address of the sender's endpoint of libfabric.
 * FETCH, STORE: as WRITE and READ, but the data does not follow: the receiver reads it from memory of the sender's, or
 * writes it there, by libfabric. After the blocks comes an Origin.
 * CHECK: `count` blocks follow. It asks what became of them, and is answered.
 * ANSWER: one for each WRITE, READ, FETCH, STORE, PERMIT and CHECK, in their order. `count` is an errno: EACCES if a
 * block is not registered, EFAULT if it is not mapped, EPERM if it is protected; `bytes` is then the block's number.
 * Without an error `bytes` bytes of data follow, the READ's, and after them a second head, whose errno tells what
 * became of the blocks meanwhile: after an error the rest of the data was zeros.
 */
typedef struct Frame {
  uint32_t kind, count;
  uint64_t bytes;
} Frame;

/* Memory that a peer registered with libfabric. */
typedef struct Origin {
  uint64_t address, key;
} Origin;

/* Blocks that frames of a link carry, or a question about one. */
typedef struct Request {
  Node node; /* of those with frames to be sent */
  ProxycclTransfer *transfer;
  int active; /* it has started and not ended */
  int writes;
  const struct iovec *local, *remote;
  uint64_t count;
  Position at;                         /* of what is not sent, … */
  uint64_t left;                       /* … its bytes */
  uint32_t unanswered;                 /* its frames */
  uint32_t refusal;                    /* the first errno of an answer */
  int asks;                            /* a copy failed: the peer is asked what became of the memory at `fault` */
  ProxycclFault fault;                 /* of a refusal */
  const Origin *origin;                /* where the peer reads or writes the data by libfabric; NULL: frames carry it */
  void (*ended)(struct Request *self); /* after its last answer, or when its link is lost */
} Request;

/* A frame that the peer has not answered. */
typedef struct Awaited {
  Request *request; /* NULL: canceled */
  Position at;      /* where its first block begins in the request's lists */
  uint64_t bytes;   /* of a READ's data; 0: another frame */
} Awaited;

/* An answer that has not begun to be sent. */
typedef struct Answer {
  struct Answer *next;
  uint32_t error;
  uint64_t bytes; /* of a READ's data; after an error the number of the block */
  Device *device; /* whose memory a READ is of; NULL: the host's */
  Stage *stage;   /* with a READ's data, or a WRITE's that is copied from there; NULL: none, or not yet */
  struct iovec staged;
  int by_fabric, fetches; /* of a FETCH or a STORE */
  int steps;              /* begun, of those: ANSWER_STEPS when all are done */
  Origin origin;
  uint64_t data; /* its bytes */
  uint64_t count;
  struct iovec blocks[]; /* of a READ, a FETCH or a STORE */
} Answer;

/* The frame that is being sent: a head, data from blocks, and the second head of an answer. */
typedef struct Sending {
  Buffer head;
  size_t sent; /* of the head */
  const struct iovec *blocks;
  uint64_t count;
  Position at;
  uint64_t left;        /* bytes of data */
  Request *request;     /* whose blocks they are; NULL: not a request's */
  const Answer *answer; /* likewise; NULL: `own` */
  void *own;            /* freed after the frame */
  Stage *stage;         /* of an answer's data; NULL: none */
  uint64_t memory;      /* the version of the agent's memory for which the blocks of an answer were checked */
  Frame tail;           /* the second head, after the data of an answer */
  size_t tail_left;     /* its bytes that are not sent */
} Sending;

/* The parts of a frame, in their order. */
typedef enum FramePart { IN_HEAD, IN_BODY, IN_DATA, IN_TAIL } FramePart;

/* The frame that is being received: a head, a body in memory of the link's, data for blocks, and the second head of an
 * answer with data. */
typedef struct Receiving {
  Frame frame; /* the head, or the second one */
  FramePart part;
  size_t have;  /* bytes of the head, or of the body */
  Stage *stage; /* where a WRITE's data goes; NULL: to its blocks */
  struct iovec staged;
  Buffer body;
  uint64_t body_bytes;        /* of the whole body */
  const struct iovec *blocks; /* of a WRITE, in `body`; NULL: nowhere */
  uint64_t count;
  Position at;
  uint64_t left;   /* bytes of data */
  uint32_t error;  /* of a WRITE, for its answer, … */
  uint64_t block;  /* … and the number of the block */
  uint64_t memory; /* as in Sending */
} Receiving;

struct ProxycclLink {
  ProxycclLink *next; /* of the agent's */
  ProxycclAgent *agent;
  int socket, process; /* -1: closed, or none */
  int serves;          /* the peer opened it */
  int greeted;         /* a serving link's greeting has arrived */
  int asked;           /* a PERMIT has arrived: the peer sends nothing else */
  int addressed;       /* and its endpoint's address: */
  uint64_t address;    /* an fi_addr_t */
  const char *lost;    /* atomic: why it ended */
  uint32_t references; /* its handle, transfers, and stages that libfabric fills or empties for it */
  pid_t pid;           /* 0: everything moves through the socket */
  char *name;          /* of the peer, of a serving link */
  uint32_t name_bytes;
  int writable;    /* the socket is watched for room */
  int helped;      /* a caller has looked at the socket since the thread did */
  int resting;     /* the thread leaves the socket to callers */
  Buffer messages; /* frames to be sent before the next one with data */
  Sending out;
  Receiving in;
  Queue requests; /* with frames to send, in turn */
  Awaited awaited[WINDOW];
  uint32_t oldest, unanswered;
  Answer *answer, **last_answer;
  uint32_t answers;
  char *ahead; /* AHEAD_BYTES that were read, and … */
  size_t ahead_at, ahead_end;
};

/* The registrations of one side of a transfer: proxyccl_transfer_guard. */
typedef struct Guard {
  const uint64_t *ledger, *rows; /* NULL: not known, the peer itself checks the blocks */
  uint64_t count;
  uint64_t seen; /* word 0 of the ledger when all stood; UINT64_MAX: not yet */
} Guard;

/* How a kind of transfers moves its data. A path has a struct of its own, which begins with a ProxycclTransfer, in its
 * own file. All with the agent locked; those that copy unlock it meanwhile. */
typedef struct TransferPath {
  /* Starts one that has bytes to move, and whose link lives. `stream`: NULL unless a device copies. */
  void (*begin)(ProxycclTransfer *self, const uint64_t *stream);
  /* Goes on with one in the agent's list `looked_at`, without waiting: 1 if it ended, or something of it did. NULL: it
   * is in that list only until its stream has come to it. */
  int (*look)(ProxycclTransfer *self);
  /* Copies a piece that nobody copies yet: 1. 0: there is none, or no stage for it. NULL: threads copy none. */
  int (*copy)(ProxycclTransfer *self);
  /* The part of a caller that asks whether it has ended. */
  void (*help)(ProxycclTransfer *self);
  /* Begins nothing more, and waits until nothing touches its memory: 1. 0: after the time something still does. */
  int (*finish)(ProxycclTransfer *self, uint64_t timeout_ns);
  /* Its link is lost: of those in the agent's list `copies`. */
  void (*lose)(ProxycclTransfer *self);
  int silent; /* nothing wakes those who wait: they look */
  int soon;   /* the next look is due soon, however long the transfer takes */
} TransferPath;

struct ProxycclTransfer {
  Node node; /* of its list */
  const TransferPath *path;
  ProxycclAgent *agent;
  ProxycclLink *link; /* NULL: within the agent */
  int writes;
  uint64_t blocks, bytes;
  ProxycclTransferState state; /* atomic */
  int error;
  int copying; /* threads that copy a piece, or look at the device */
  int cancel;
  int abandoned;   /* it ends as canceled as soon as nothing touches its memory, … */
  int orphaned;    /* … and is freed */
  Guard guards[2]; /* of this side, and of the remote one */
  ProxycclFault fault;
  uint64_t *words; /* of the stream that it belongs to; NULL: none */
  int rung;        /* 0: the stream has not come to it */
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
  int spare; /* given up to accept, and close, a link when no descriptor is left */
  int *listeners;
  uint32_t listener_count;
  int stopped;
  uint32_t resting;    /* links */
  uint32_t references; /* its handle, links, transfers */
  char *name;
  char secret[PROXYCCL_SECRET_BYTES];
  int copied; /* peers may copy from and to this process */
  int losses; /* an eventfd for links that were lost; -1: none */
  ProxycclLink *links;
  Queue copies;    /* transfers of which threads copy pieces, in turn */
  Queue looked_at; /* those of devices and streams, in turn */
  Buffer inbox;
  size_t read;              /* of the inbox */
  uint64_t unread;          /* atomic: bytes of the inbox that are not read */
  ProxycclTransferLog *log; /* NULL: none */
  struct Fabric *fabric;    /* NULL: it has no endpoint of libfabric */
  Ranges host;
  Device *devices;
  uint64_t memory;     /* the registered memory's version */
  Queue stages;        /* that a device copies, in turn */
  int starved;         /* an answer waits for a stage */
  int waits_for_stage; /* the thread waits for a stage, to copy a transfer's next piece */
  int feeds;           /* serving links may go on with their answers */
  uint64_t turns;
};

/* The files, each of which calls only those before it. */

/* guard.c. Not locked. */
/* Makes the process's handler of faults the newest, unless it is. 0 or an errno. */
int guard_install(void);
/* Takes the signals of faults out of those that a thread blocks: the kernel ends a process that blocks them. */
void guard_admit(sigset_t *blocked);
/* Copies blocks of equal lengths, `bytes` in all, as memmove does, between memory of which the program may have freed
 * some. Returns the bytes up to the first that can't be touched, or all. */
uint64_t guard_copy(const struct iovec *to, const struct iovec *from, uint64_t count, uint64_t bytes);

/* blocks.c */
/* The next bytes of blocks from a place on, as at most `most_parts` parts. Returns their bytes. */
uint64_t blocks_parts(const struct iovec *blocks, uint64_t count, Position at, uint64_t most_bytes, uint32_t most_parts,
                      struct iovec *parts, uint32_t *part_count);
void blocks_advance(const struct iovec *blocks, Position *at, uint64_t bytes);
int is_mapped(const void *address); /* in this process */

/* driver.c. Not locked. Statuses are the driver's. */
/* The calling thread's state before it used a device. */
typedef struct Entered {
  uint64_t context;
  int mode;
} Entered;
/* Makes the device current, and allows calls that a graph capture elsewhere in the process forbids. */
Entered driver_enter(const ProxycclCopier *copier);
void driver_leave(const ProxycclCopier *copier, Entered before);
int driver_copy(const ProxycclCopier *copier, uint64_t to, uint64_t from, uint64_t bytes, void *stream);
int driver_write(const ProxycclCopier *copier, void *stream, uint64_t word, uint64_t value);
int driver_reached(const ProxycclCopier *copier, void *event);
/* Queues copies between a stage's memory and a device's blocks, one after another, and records its event. */
int staging_queue(const ProxycclStaging *staging, uint32_t stage, void *memory, int to_device,
                  const struct iovec *blocks, uint64_t count);
int staging_reached(const ProxycclStaging *staging, uint32_t stage); /* its event */
int staging_await(const ProxycclStaging *staging, uint32_t stage);   /* likewise, at most 30 s */

/* agent.c. All that follow are called with the agent locked. */
int agent_watch(ProxycclAgent *agent, int descriptor, uintptr_t tag, int operation, uint32_t events); /* 0, an errno */
void agent_wake(ProxycclAgent *agent);
struct timespec agent_deadline(uint64_t timeout_ns);
void agent_unreference(ProxycclAgent *agent); /* unlocks */
void agent_free(ProxycclAgent *agent);
int agent_receive(ProxycclAgent *agent, const char *name, uint64_t name_bytes, const char *message, uint64_t bytes);
/* The number of the first block that is not registered, or not of the same kind of memory as the first; `count`: there
 * is none. `device`: that of the first block, or NULL. */
uint64_t agent_lacks(const ProxycclAgent *agent, const struct iovec *blocks, uint64_t count, Device **device);

/* fabric.c */
void rdma_start(ProxycclAgent *agent, Rdma *rdma, uint64_t bytes);
void rdma_drop(ProxycclAgent *agent, Rdma *rdma);                         /* what is not posted */
int fabric_know(ProxycclLink *link, const void *address, uint64_t bytes); /* 0: the provider refuses it */
void fabric_forget(ProxycclLink *link);
int fabric_failed(const ProxycclAgent *agent); /* 1: the queue has ended */
void fabric_poll(ProxycclAgent *agent);
uint64_t fabric_rest(ProxycclAgent *agent); /* ns until its thread must poll again; UINT64_MAX: when it is woken */
void fabric_lose(ProxycclLink *link);       /* the link is lost */
/* Waits a second for what is posted, and ends the rest: the endpoint is closed before its memory is used again. */
void fabric_stop(ProxycclAgent *agent);

/* stages.c. By the agent's thread. */
Stage *stage_take(ProxycclLink *link, Device *device);        /* NULL: there is no memory */
Stage *stage_take_pinned(ProxycclLink *link, Device *device); /* NULL: none is free; `feeds` tells of one */
void stage_give(Stage *stage);                                /* its link no longer needs it */
void stage_copy(Stage *stage, int to_device, const struct iovec *blocks, uint64_t count); /* unlocks meanwhile */
/* Reads its data from a peer's memory, or writes it there, by libfabric. */
void stage_carry(Stage *stage, int writes, uint64_t bytes, const Origin *origin);
void stages_look(ProxycclAgent *agent);   /* unlocks meanwhile; `feeds` tells that some are copied */
void stages_finish(ProxycclAgent *agent); /* waits for all copies; the thread has ended */

/* link.c */
ProxycclLink *link_new(ProxycclAgent *agent, int socket, int process, int serves);
void link_lose(ProxycclLink *link, const char *reason);
void link_unreference(ProxycclLink *link);
void link_free(ProxycclLink *link);
void link_ready(ProxycclLink *link, uint32_t events);
void link_watched(ProxycclLink *link, uint32_t events); /* by the thread */
void link_send(ProxycclLink *link);
void links_feed(ProxycclAgent *agent); /* lets links go on with their answers; by the thread */
void link_help(ProxycclLink *link);    /* by a caller that will come again soon */
void link_look(ProxycclLink *link);    /* loses it if the peer has gone, of which the thread may not have heard yet */
void link_wake(ProxycclLink *link);    /* its socket is the thread's again */
int link_append(ProxycclLink *link, FrameKind kind, uint32_t count, const void *first, uint64_t first_bytes,
                const void *second, uint64_t second_bytes);
/* Starts a request that is not active: for its blocks' bytes, or, if `asked` is not NULL, for what became of that
 * memory.
 */
void link_start(ProxycclLink *link, Request *request, uint64_t bytes, const ProxycclFault *asked);
void link_forget(ProxycclLink *link, Request *request); /* from now on nothing touches its local memory */

/* log.c */
void log_end(const ProxycclTransfer *transfer, ProxycclTransferState state);

/* transfer.c */
/* Make the struct of a path, of `bytes` bytes. Not locked. NULL with errno. */
ProxycclTransfer *transfer_new(ProxycclAgent *agent, ProxycclLink *link, size_t bytes, const TransferPath *path);
ProxycclTransfer *transfer_of_blocks(ProxycclAgent *agent, ProxycclLink *link, size_t bytes, const TransferPath *path,
                                     const ProxycclBlocks *blocks);
void transfer_end(ProxycclTransfer *transfer, ProxycclTransferState state);
void transfer_end_canceled(ProxycclTransfer *transfer); /* one that is abandoned; it may be freed */
/* As the answers to its frames, or to a question about it, say. */
void transfer_end_answered(ProxycclTransfer *transfer, uint32_t refusal, const ProxycclFault *fault, int asked);
void transfer_answered(Request *request); /* the same of one that has no other request */
/* Whether the registrations of its blocks stand, on both sides as far as this one knows. Otherwise `fault` names one.
 */
int transfer_stands(ProxycclTransfer *transfer);
void transfer_end_deregistered(ProxycclTransfer *transfer);           /* they do not */
void transfer_watch(ProxycclTransfer *transfer);                      /* the thread looks at it from now on */
int transfer_cancel(ProxycclTransfer *transfer, uint64_t timeout_ns); /* see proxyccl_transfer_cancel */
void transfers_look(ProxycclAgent *agent);                            /* at all that are looked at */
uint64_t transfers_pause(const ProxycclAgent *agent);                 /* ns until the next look */

/* The paths: copy_path.c, socket_path.c, fabric_path.c, device_path.c, staged_path.c. Then thread.c. */

#endif
