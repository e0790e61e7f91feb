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
#include "transfers.h"

enum {
  FRAME_BLOCKS = 512,      /* most blocks of one frame */
  FRAME_BYTES = 512 << 10, /* most data of one frame */
  WINDOW = 16,             /* most frames of one link that are not answered */
  PIECE_BYTES = 1 << 20,   /* most that a thread copies at once */
  SHORT_BYTES = 64 << 10,  /* a device's copy up to this is waited for by whoever starts it, … */
  SHORT_NS = 20000,        /* … at most this long: it takes less than waking a thread */
  LONGEST_CANCEL_S = 30,   /* a device or an adapter that takes longer hangs */
  FED = 2,                 /* most answers of one link that have a stage */
  LONGEST_ADDRESS = 512,   /* of an endpoint of libfabric */
  AHEAD_BYTES = 64 << 10,  /* read from a socket at once */
  UNGREETED = 64           /* most accepted links that have not sent their greeting */
};

/* The tag of an event: 0 for the eventfd, else a pointer, with its kind in the bits that alignment leaves free. */
enum { TAG_LINK = 0, TAG_PROCESS = 1, TAG_LISTENER = 2, TAG_FABRIC = 3, TAG_BITS = 3 };

/* Registered memory: first addresses in order, then for each the highest end of the ranges up to it. */
typedef struct Ranges {
  uint64_t *bounds, count;
} Ranges;

/* Memory by way of which a link serves a device's memory: one of the device's stages, or, if all are in use, memory
 * that is not pinned. */
typedef struct Stage {
  struct Stage *next; /* of those that a device copies */
  ProxycclAgent *agent;
  struct Device *device;
  uint32_t number; /* PROXYCCL_STAGES: not pinned */
  char *memory;
  int copying;        /* by a device, or by a request to libfabric */
  int status;         /* the driver's, of copies that failed, or -1 */
  uint64_t row[6];    /* of that request */
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

/* A place in a list of blocks. */
typedef struct Position {
  uint64_t index, offset;
} Position;

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

/* A frame that the peer has not answered. */
typedef struct Awaited {
  ProxycclTransfer *transfer; /* NULL: canceled */
  Position at;                /* where its first block begins in the transfer's lists */
  uint64_t bytes;             /* of a READ's data; 0: another frame */
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
  uint64_t left;              /* bytes of data */
  ProxycclTransfer *transfer; /* whose blocks they are; NULL: not a transfer's */
  const Answer *answer;       /* likewise; NULL: `own` */
  void *own;                  /* freed after the frame */
  Stage *stage;               /* of an answer's data; NULL: none */
  uint64_t memory;            /* the version of the agent's memory for which the blocks of an answer were checked */
  Frame tail;                 /* the second head, after the data of an answer */
  size_t tail_left;           /* its bytes that are not sent */
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
  uint32_t references; /* its handle, and transfers */
  pid_t pid;           /* 0: everything moves through the socket */
  char *name;          /* of the peer, of a serving link */
  uint32_t name_bytes;
  int writable;    /* the socket is watched for room */
  int helped;      /* a caller has looked at the socket since the thread did */
  int resting;     /* the thread leaves the socket to callers */
  Buffer messages; /* frames to be sent before the next one with data */
  Sending out;
  Receiving in;
  ProxycclTransfer *first, **last; /* transfers with frames to send, in turn */
  Awaited awaited[WINDOW];
  uint32_t oldest, unanswered;
  Answer *answer, **last_answer;
  uint32_t answers;
  char *ahead; /* AHEAD_BYTES that were read, and … */
  size_t ahead_at, ahead_end;
};

typedef enum PartState {
  PART_IDLE,
  PART_COPYING, /* between the device and its stage */
  PART_MOVING,  /* between its stage and the socket */
  PART_MOVED
} PartState;

/* The use of a stage in a transfer between a device and a socket. */
typedef struct Part {
  PartState state;
  ProxycclTransfer *mover; /* one frame */
  Origin origin;           /* of the stage, by libfabric */
  struct iovec stage, local[FRAME_BLOCKS], remote[FRAME_BLOCKS];
  uint32_t blocks;
} Part;

/* The registrations of one side of a transfer: proxyccl_transfer_guard. */
typedef struct Guard {
  const uint64_t *ledger, *rows; /* NULL: not known, the peer itself checks the blocks */
  uint64_t count;
  uint64_t seen; /* word 0 of the ledger when all stood; UINT64_MAX: not yet */
} Guard;

struct ProxycclTransfer {
  ProxycclTransfer *next; /* of its queue */
  ProxycclAgent *agent;
  ProxycclLink *link; /* NULL: within the agent */
  int writes;
  const struct iovec *local, *remote;
  uint64_t count, bytes;
  ProxycclTransferState state; /* atomic */
  int error;
  int queued;
  int copying; /* threads that copy a piece, or look at the device */
  int cancel;
  Position at;         /* of what is neither copied nor being copied, or not sent */
  uint64_t left;       /* bytes from there on */
  uint32_t unanswered; /* its frames */
  uint32_t refusal;    /* the first errno of an answer */
  int asks;            /* the kernel could not copy: the peer is asked what became of the block */
  Guard guards[2];     /* of this side, and of the remote one */
  ProxycclFault fault;
  uint64_t faulted;               /* bytes of the copy that were left where the fault is */
  const ProxycclStaging *staging; /* NULL: pieces are copied without stages */
  int staged[PROXYCCL_STAGES];    /* the stages that a thread has */
  int by_socket;                  /* its link's frames carry it */
  pid_t pid;                      /* the process that the kernel copies from and to; 0: none */
  Part *parts;                    /* PROXYCCL_STAGES of them, by socket with stages; else NULL */
  ProxycclTransfer *whole;        /* of a part's mover; else NULL */
  const Origin *origin;           /* of a mover whose data the peer moves by libfabric; else NULL */
  Stage *served;                  /* of a request by which this side does so; else NULL */
  const uint64_t *rows;           /* of requests to libfabric; else NULL */
  uint64_t peer;                  /* their fi_addr_t */
  int abandoned;                  /* it ends as canceled with the last of them, … */
  int orphaned;                   /* … and is freed */
  const ProxycclCopier *copier;   /* NULL: no device copies it */
  const uint64_t *copies;         /* (to, from, bytes) */
  uint64_t copy_count;
  const ProxycclLaunch *launch; /* NULL: none */
  void *stream, *event;
  uint64_t *word, word_on_device, turn; /* the stream writes `turn` to the word after the copies */
  uint64_t checked;                     /* when the device was last asked whether it has failed */
  uint64_t *words;                      /* of the stream that it belongs to; NULL: none */
  int rung;                             /* 0: the stream has not come to it */
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
  ProxycclTransfer *first, **last;               /* transfers to copy, in turn */
  ProxycclTransfer *looked_at, **last_looked_at; /* those of devices and streams, to be looked at in turn */
  Buffer inbox;
  size_t read;              /* of the inbox */
  uint64_t unread;          /* atomic: bytes of the inbox that are not read */
  ProxycclTransferLog *log; /* NULL: none */
  struct Fabric *fabric;    /* NULL: it has no endpoint of libfabric */
  Ranges host;
  Device *devices;
  uint64_t memory;             /* the registered memory's version */
  Stage *stages, **last_stage; /* in turn */
  int starved;                 /* an answer waits for a stage */
  int waits_for_stage;         /* the thread waits for a stage, to copy a transfer's next piece */
  int feeds;                   /* serving links may go on with their answers */
  uint64_t turns;
};

/* agent.c */
/* 0 or an errno. */
int agent_watch(ProxycclAgent *agent, int descriptor, uintptr_t tag, int operation, uint32_t events);
void agent_wake(ProxycclAgent *agent);
int agent_watch_fabric(ProxycclAgent *agent, int descriptor); /* -1: there is none to watch */
struct timespec agent_deadline(uint64_t timeout_ns);
void agent_unreference(ProxycclAgent *agent); /* unlocks */
int agent_receive(ProxycclAgent *agent, const char *name, uint64_t name_bytes, const char *message, uint64_t bytes);
/* The number of the first block that is not registered, or not of the same kind of memory as the first; `count`: there
 * is none. `device`: that of the first block, or NULL. */
uint64_t agent_lacks(const ProxycclAgent *agent, const struct iovec *blocks, uint64_t count, Device **device);

/* guard.c. Not locked. */
/* Makes the process's handler of faults the newest, unless it is. 0 or an errno. */
int guard_install(void);
/* Takes the signals of faults out of those that a thread blocks: the kernel ends a process that blocks them. */
void guard_admit(sigset_t *blocked);
/* Copies blocks of equal lengths, `bytes` in all, as memmove does, between memory of which the program may have freed
 * some. Returns the bytes up to the first that can't be touched, or all. */
uint64_t guard_copy(const struct iovec *to, const struct iovec *from, uint64_t count, uint64_t bytes);

/* log.c. With the agent locked. */
void log_end(const ProxycclTransfer *transfer, ProxycclTransferState state);

/* link.c. All with the agent locked. */
ProxycclLink *link_new(ProxycclAgent *agent, int socket, int process, int serves);
void link_lose(ProxycclLink *link, const char *reason);
void link_unreference(ProxycclLink *link);
void link_free(ProxycclLink *link);
void link_ready(ProxycclLink *link, uint32_t events);
void link_watched(ProxycclLink *link, uint32_t events); /* by the thread */
void link_send(ProxycclLink *link);
void link_help(ProxycclLink *link); /* by a caller that will come again soon */
void link_look(ProxycclLink *link); /* loses it if the peer has gone, of which the thread may not have heard yet */
void link_wake(ProxycclLink *link); /* its socket is the thread's again */
int link_append(ProxycclLink *link, FrameKind kind, uint32_t count, const void *first, uint64_t first_bytes,
                const void *second, uint64_t second_bytes);
void link_forget_transfer(ProxycclLink *link, ProxycclTransfer *transfer); /* one that is not queued */

/* transfer.c. All with the agent locked. */
/* The next bytes of blocks from a place on, as at most `most_parts` parts. Returns their bytes. */
uint64_t blocks_parts(const struct iovec *blocks, uint64_t count, Position at, uint64_t most_bytes, uint32_t most_parts,
                      struct iovec *parts, uint32_t *part_count);
void blocks_advance(const struct iovec *blocks, Position *at, uint64_t bytes);
int is_mapped(const void *address);                                       /* in this process */
ProxycclTransfer *transfer_new(ProxycclAgent *agent, ProxycclLink *link); /* not locked */
void transfer_queue(ProxycclTransfer *transfer, ProxycclTransfer ***last);
void transfer_unqueue(ProxycclTransfer *transfer, ProxycclTransfer **first, ProxycclTransfer ***last);
void transfer_end(ProxycclTransfer *transfer, ProxycclTransferState state);
void transfer_end_answered(ProxycclTransfer *transfer);   /* its last answer has come */
int transfer_has_piece(const ProxycclTransfer *transfer); /* one that nobody copies yet, and a stage for it */
void transfer_copy(ProxycclTransfer *transfer);           /* that piece; unlocks meanwhile */
void transfer_begin(ProxycclTransfer *transfer, const uint64_t *stream);
void transfer_restart(ProxycclTransfer *transfer); /* one without a message, which is not active */
int transfer_look(ProxycclTransfer *transfer);     /* begins it if its stream has come to it; 1: that it did */
int transfer_is_looked_at(const ProxycclTransfer *transfer); /* it has a device or a stream that wakes nobody */
int transfer_cancel(ProxycclTransfer *transfer, uint64_t timeout_ns); /* see proxyccl_transfer_cancel */
ProxycclTransfer *transfer_make(ProxycclAgent *agent, ProxycclLink *link);
void transfer_free(ProxycclTransfer *transfer); /* its caller has a reference to the agent, and stays locked */
void transfer_lose(ProxycclTransfer *transfer); /* a copy, whose link is lost */

/* staged.c. All with the agent locked; they unlock meanwhile, except staged_moved. */
int staged_create(ProxycclTransfer *transfer, int by_fabric); /* 0: there is no memory */
int staged_look(ProxycclTransfer *transfer); /* goes on with it: 1 if it ended, or something of it did */
void staged_moved(ProxycclTransfer *mover);
/* Cancels its parts, and waits until nothing touches its memory: 1. 0: something still does. */
int staged_finish(ProxycclTransfer *transfer, uint64_t timeout_ns);
void staged_free(ProxycclTransfer *transfer);

/* fabric.c. All with the agent locked. */
void fabric_start(ProxycclTransfer *transfer);
int fabric_know(ProxycclLink *link, const void *address, uint64_t bytes); /* 0: the provider refuses it */
void fabric_forget(ProxycclLink *link);
/* Reads a stage's data from a peer's memory, or writes it there. 0: there is no memory. */
int fabric_carry(Stage *stage, int writes, uint64_t bytes, const Origin *origin);
void fabric_poll(ProxycclAgent *agent);
uint64_t fabric_rest(ProxycclAgent *agent); /* ns until its thread must poll again; UINT64_MAX: when it is woken */
void fabric_lose(ProxycclLink *link);       /* the link is lost */
/* Begins no further copies, and waits until nothing touches its memory: 1. 0: something still does. Unlocks. */
int fabric_finish(ProxycclTransfer *transfer, uint64_t timeout_ns);
void fabric_stop(ProxycclAgent *agent); /* likewise for all; the thread has ended */
void fabric_free(ProxycclAgent *agent);

/* stages.c. All with the agent locked, by its thread. */
Stage *stage_take(ProxycclLink *link, Device *device);        /* NULL: there is no memory */
Stage *stage_take_pinned(ProxycclLink *link, Device *device); /* NULL: none is free; `feeds` tells of one */
void stage_carried(ProxycclTransfer *request);                /* by libfabric; frees the request */
void stages_feed(ProxycclAgent *agent);                       /* lets links go on with their answers */
void stage_give(Stage *stage);                                /* its link no longer needs it */
void stage_copy(Stage *stage, int to_device, const struct iovec *blocks, uint64_t count); /* unlocks meanwhile */
void stages_look(ProxycclAgent *agent);                                                   /* likewise */
void stages_finish(ProxycclAgent *agent); /* waits for all copies; the thread has ended */

/* device.c. All with the agent locked; they unlock meanwhile. */
void device_start(ProxycclTransfer *transfer, const uint64_t *stream);
int device_look(ProxycclTransfer *transfer); /* ends it if the device is done: 1 */
void device_look_at_all(ProxycclAgent *agent);
uint64_t device_pause(const ProxycclAgent *agent); /* ns until the next look */
/* Copies a piece by way of a stage; `copied`: the bytes from or to the peer. 0, an errno, or the driver's status times
 * -1. Not locked. */
int device_stage(const ProxycclTransfer *transfer, uint32_t stage, const struct iovec *local,
                 const struct iovec *remote, uint32_t blocks, uint64_t bytes, uint64_t *copied);
/* Queues copies between a stage's memory and a device's blocks, one after another, and records its event. The driver's
 * status. Not locked. */
int device_queue(const ProxycclStaging *staging, uint32_t stage, void *memory, int to_device,
                 const struct iovec *blocks, uint64_t count);
int device_reached(const ProxycclStaging *staging, uint32_t stage); /* its event: the driver's status. Not locked. */
int device_await(const ProxycclStaging *staging, uint32_t stage);   /* likewise, at most 30 s */
void device_rest(ProxycclTransfer *transfer);                       /* between two looks of a caller */
void device_finish(ProxycclTransfer *transfer);                     /* waits until nothing touches its memory */

#endif
