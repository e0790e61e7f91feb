/* Receives a link's frames. See parts.h. Data is received directly into the blocks, except for data that was read ahead
 * from the socket together with a head.
 */
#include <errno.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include "parts.h"

enum { LONGEST_NAME = 4096 };

/* Ends a link if `got`, the result of a receive, reports the end of the stream or an error other than EAGAIN. */
static void lose_at_end(ProxycclLink *link, ssize_t got) {
  if (got < 0 && errno == EAGAIN) return;
  const int closed = got == 0 || errno == ECONNRESET;
  link_lose(link, closed ? "the peer has closed the link" : "the peer's host does not answer, or it takes no data");
}

/* Fills the link's read-ahead buffer, unless the buffer has data. Returns 0 if the socket is empty or the link is lost,
 * else 1. */
static int read_ahead(ProxycclLink *link) {
  if (link->ahead_at < link->ahead_end) return 1;
  ssize_t got;
  do {
    got = recv(link->socket, link->ahead, AHEAD_BYTES, MSG_DONTWAIT);
  } while (got < 0 && errno == EINTR);
  if (got <= 0) {
    lose_at_end(link, got);
    return 0;
  }
  link->ahead_at = 0;
  link->ahead_end = (size_t)got;
  return 1;
}

/* Receives at most `bytes` bytes, and discards them if `to` is NULL. Returns the number of received bytes, which is 0
 * if the socket is empty or the link is lost. */
static size_t take(ProxycclLink *link, void *to, size_t bytes) {
  if (!read_ahead(link)) return 0;
  const size_t ready = link->ahead_end - link->ahead_at;
  const size_t taken = bytes < ready ? bytes : ready;
  if (to != NULL) memcpy(to, link->ahead + link->ahead_at, taken);
  link->ahead_at += taken;
  return taken;
}

/* Copies bytes to blocks. Returns the number of copied bytes, which is less than `bytes` if the next byte can't be
 * written. */
static size_t copy_out(const struct iovec *parts, uint32_t count, const char *from, size_t bytes) {
  size_t done = 0;
  for (uint32_t i = 0; i < count && done < bytes; ++i) {
    const size_t part = parts[i].iov_len < bytes - done ? parts[i].iov_len : bytes - done;
    const struct iovec to = {parts[i].iov_base, part}, source = {(char *)from + done, part};
    const size_t copied = guard_copy(&to, &source, 1, part);
    done += copied;
    if (copied < part) break;
  }
  return done;
}

/* Receives at most `bytes` bytes into blocks, and further bytes into the read-ahead buffer. Returns the number of bytes
 * in the blocks: 0 if the socket is empty or the link is lost, -1 if the blocks can't be written. */
static ssize_t take_out(ProxycclLink *link, const struct iovec *blocks, uint64_t count, Position at, uint64_t bytes) {
  struct iovec parts[FRAME_BLOCKS + 1];
  uint32_t used;
  bytes = blocks_parts(blocks, count, at, bytes, FRAME_BLOCKS, parts, &used);
  if (link->ahead_at == link->ahead_end) {
    parts[used] = (struct iovec){link->ahead, AHEAD_BYTES};
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = used + 1};
    ssize_t got;
    do {
      got = recvmsg(link->socket, &message, MSG_DONTWAIT);
    } while (got < 0 && errno == EINTR);
    if (got > (ssize_t)bytes) {
      link->ahead_at = 0;
      link->ahead_end = (size_t)got - bytes;
      return (ssize_t)bytes;
    }
    if (got > 0) return got;
    if (got == 0 || errno != EFAULT) { /* after EFAULT, copy_out finds the inaccessible byte */
      lose_at_end(link, got);
      return 0;
    }
  }
  if (!read_ahead(link)) return 0;
  const size_t ready = link->ahead_end - link->ahead_at;
  const size_t taken = copy_out(parts, used, link->ahead + link->ahead_at, bytes < ready ? bytes : ready);
  link->ahead_at += taken;
  return taken > 0 ? (ssize_t)taken : -1;
}

/* Returns the number of bytes in a frame's body, or -1 if the frame is invalid. */
static int64_t body_of(const ProxycclLink *link, const Frame *frame) {
  if (!link->serves) {
    if (frame->kind != FRAME_ANSWER || link->unanswered == 0) return -1;
    /* The newest frame can't be answered before all its data is sent: its request would end, and the caller might then
     * reuse the memory from which the link still sends. */
    if (link->unanswered == 1 && link->out.request != NULL && link->out.left > 0) return -1;
    if (frame->count != 0) return frame->bytes < FRAME_BLOCKS ? 0 : -1;
    return frame->bytes == link->awaited[link->oldest % WINDOW].bytes ? 0 : -1;
  }
  if (link->asked) return -1;
  if (!link->greeted) {
    const uint64_t name = frame->bytes - PROXYCCL_SECRET_BYTES;
    if (frame->kind == FRAME_PERMIT) return frame->count == VERSION && name == 0 ? (int64_t)frame->bytes : -1;
    return frame->kind == FRAME_HELLO && frame->count == VERSION && name >= 1 && name <= LONGEST_NAME
               ? (int64_t)frame->bytes
               : -1;
  }
  if (frame->kind == FRAME_MESSAGE) return frame->bytes <= PROXYCCL_LONGEST_MESSAGE ? (int64_t)frame->bytes : -1;
  if (frame->kind == FRAME_ADDRESS) {
    return frame->bytes <= PROXYCCL_AGENT_RAILS * PROXYCCL_ADDRESS_BYTES ? (int64_t)frame->bytes : -1;
  }
  const int by_fabric = frame->kind == FRAME_FETCH || frame->kind == FRAME_STORE;
  if (!by_fabric && frame->kind != FRAME_WRITE && frame->kind != FRAME_READ && frame->kind != FRAME_CHECK) return -1;
  if (frame->count < 1 || frame->count > FRAME_BLOCKS || frame->bytes > FRAME_BYTES || link->answer_count > WINDOW)
    return -1;
  return (int64_t)(frame->count * sizeof(struct iovec) + (by_fabric ? sizeof(Origin) : 0));
}

/* Queues an answer. Returns the answer, or NULL if out of memory. */
static Answer *answer(ProxycclLink *link, uint32_t error, uint64_t bytes, const struct iovec *blocks, uint64_t count) {
  Answer *made = malloc(sizeof *made + count * sizeof *blocks);
  if (made == NULL) return NULL;
  *made = (Answer){.error = error, .bytes = bytes, .count = count};
  if (count > 0) memcpy(made->blocks, blocks, count * sizeof *blocks);
  queue_push(&link->answers, made);
  ++link->answer_count;
  return made;
}

/* Queues an answer without data. Returns the reason if the link must end, else NULL. */
static const char *reply(ProxycclLink *link, uint32_t error, uint64_t block) {
  return answer(link, error, error != 0 ? block : 0, NULL, 0) != NULL ? NULL : OUT_OF_MEMORY;
}

/* Returns whether no block of a peer's request is empty, and all blocks have `bytes` bytes in all. */
static int blocks_have(const struct iovec *blocks, uint64_t count, uint64_t bytes) {
  for (uint64_t i = 0; i < count; ++i) {
    if (blocks[i].iov_len == 0 || blocks[i].iov_len > bytes) return 0;
    bytes -= blocks[i].iov_len;
  }
  return bytes == 0;
}

/* Returns the number of the first block whose first or last byte is not mapped, or `count`. */
static uint64_t find_unmapped(const struct iovec *blocks, uint64_t count) {
  uint64_t i = 0;
  while (i < count && is_mapped(blocks[i].iov_base) && is_mapped((char *)blocks[i].iov_base + blocks[i].iov_len - 1)) {
    ++i;
  }
  return i;
}

/* Permits the peer's process to copy from and to this process. Yama records only one permitted process, so for a second
 * peer this function permits all processes, to which the kernel's other checks still apply. Returns 0 or an errno,
 * which is EINVAL on a system without Yama. */
static int permit(const ProxycclLink *link) {
  static pid_t permitted; /* atomic, because all agents of the process use this variable */
  struct ucred peer;
  socklen_t size = sizeof peer;
  if (!link->agent->copied) return EPERM;
  if (getsockopt(link->socket, SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0) return errno;
  if (peer.pid <= 0) return ESRCH; /* the peer is in another PID namespace, or the socket is not a Unix socket */
  pid_t before = 0;
  const int only = __atomic_compare_exchange_n(&permitted, &before, peer.pid, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED) ||
                   before == peer.pid;
  return prctl(PR_SET_PTRACER, only ? (unsigned long)peer.pid : PR_SET_PTRACER_ANY, 0, 0, 0) == 0 ? 0 : errno;
}

/* Handles the complete body of a FETCH or a STORE. Returns the reason if the link must end, else NULL. */
static const char *take_by_fabric(ProxycclLink *link, const struct iovec *blocks, Device *device) {
  const Receiving *in = &link->in;
  Answer *made = answer(link, 0, 0, blocks, in->frame.count);
  if (made == NULL) return OUT_OF_MEMORY;
  made->by_fabric = 1;
  made->fetches = in->frame.kind == FRAME_FETCH;
  made->data = in->frame.bytes;
  made->device = device;
  memcpy(&made->origin, blocks + in->frame.count, sizeof made->origin);
  if (in->block < in->frame.count) {
    made->error = EACCES;
    made->bytes = in->block;
  } else if (device == NULL || !device->staging->by_fabric || link->rails == 0) {
    made->error = EHOSTUNREACH;
  }
  return NULL;
}

/* Handles a complete body. Returns the reason if the link must end, else NULL. */
static const char *take_body(ProxycclLink *link) {
  Receiving *in = &link->in;
  const Frame *frame = &in->frame;
  ProxycclAgent *agent = link->agent;
  if (frame->kind == FRAME_HELLO || frame->kind == FRAME_PERMIT) {
    unsigned different = 0;
    for (int i = 0; i < PROXYCCL_SECRET_BYTES; ++i) different |= (unsigned)(in->body.bytes[i] ^ agent->secret[i]);
    if (different != 0) return "the peer does not know the secret";
    if (frame->kind == FRAME_PERMIT) {
      link->asked = 1;
      return reply(link, (uint32_t)permit(link), 0);
    }
    link->name_bytes = (uint32_t)(in->body.used - PROXYCCL_SECRET_BYTES);
    link->name = malloc(link->name_bytes);
    if (link->name == NULL) return OUT_OF_MEMORY;
    memcpy(link->name, in->body.bytes + PROXYCCL_SECRET_BYTES, link->name_bytes);
    link->greeted = 1;
  } else if (frame->kind == FRAME_ADDRESS) {
    fabric_know(link, in->body.bytes, in->body.used);
  } else if (frame->kind == FRAME_MESSAGE) {
    if (agent_receive(agent, link->name, link->name_bytes, in->body.bytes, in->body.used) != 0) return OUT_OF_MEMORY;
  } else if (frame->kind == FRAME_ANSWER) {
    in->at = link->awaited[link->oldest % WINDOW].at;
    in->left = frame->count == 0 ? frame->bytes : 0;
    in->part = IN_DATA;
  } else {
    const struct iovec *blocks = (const struct iovec *)in->body.bytes; /* malloc aligned the body */
    if (!blocks_have(blocks, frame->count, frame->bytes)) return "the peer sent an invalid request";
    Device *device;
    in->block = agent_lacks(agent, blocks, frame->count, &device);
    if (frame->kind == FRAME_FETCH || frame->kind == FRAME_STORE) return take_by_fabric(link, blocks, device);
    if (frame->kind == FRAME_READ) {
      Answer *made = answer(link, 0, frame->bytes, blocks, frame->count);
      if (made == NULL) return OUT_OF_MEMORY;
      made->device = device;
      return NULL;
    }
    if (frame->kind == FRAME_CHECK) {
      uint32_t error = in->block < frame->count ? EACCES : 0;
      if (error == 0 && device == NULL) { /* skips device memory, which may not be mapped for the CPU */
        in->block = find_unmapped(blocks, frame->count);
        if (in->block < frame->count) error = EFAULT;
      }
      return reply(link, error, in->block);
    }
    in->error = in->block == frame->count ? 0 : EACCES;
    in->blocks = in->error == 0 ? blocks : NULL;
    in->count = frame->count;
    if (in->error == 0 && device != NULL) {
      in->stage = stage_take(link, device);
      if (in->stage == NULL) return OUT_OF_MEMORY;
      in->staged = (struct iovec){in->stage->memory, frame->bytes};
    }
    in->at = (Position){0, 0};
    in->memory = agent->memory;
    in->left = frame->bytes;
    in->part = IN_DATA;
  }
  return NULL;
}

/* Makes the link discard a WRITE's data if the WRITE's blocks are no longer registered. */
static void check_write(ProxycclLink *link) {
  Receiving *in = &link->in;
  Device *device;
  in->block = agent_lacks(link->agent, in->blocks, in->count, &device);
  if (in->block < in->count || (device != NULL) != (in->stage != NULL)) {
    in->error = EACCES;
    in->blocks = NULL;
    if (in->block == in->count) in->block = 0;
  }
  in->memory = link->agent->memory;
}

/* Handles the end of a frame's data. For a WRITE, queues the answer; for an ANSWER, removes the answered frame from its
 * request. Returns the reason if the link must end, else NULL. */
static const char *end_data(ProxycclLink *link) {
  Receiving *in = &link->in;
  if (link->serves) {
    Stage *stage = in->stage;
    if (stage != NULL && in->blocks != NULL) check_write(link);
    Answer *made = answer(link, in->error, in->error != 0 ? in->block : 0, NULL, 0);
    if (made == NULL) return OUT_OF_MEMORY;
    in->stage = NULL;
    if (stage != NULL && in->error == 0) {
      made->stage = stage; /* the answer is sent only after the copies from the stage */
      stage_copy(stage, 1, in->blocks, in->count);
    } else if (stage != NULL) {
      stage_give(stage);
    }
    return NULL;
  }
  const Position at = link->awaited[link->oldest % WINDOW].at;
  Request *request = link->awaited[link->oldest % WINDOW].request;
  ++link->oldest;
  --link->unanswered;
  if (request == NULL) return NULL;
  --request->unanswered;
  if (in->frame.count != 0 && request->refusal == 0) {
    request->refusal = in->frame.count;
    const uint64_t block = at.index + in->frame.bytes; /* the peer numbers blocks from the frame's first block */
    if (!request->asks && block < request->count) {
      char *address = request->remote[block].iov_base;
      request->fault.address = (uintptr_t)(in->frame.bytes == 0 ? address + at.offset : address);
    }
  }
  if (request->refusal != 0)
    queue_remove(&link->requests, request); /* a refused request does not send further frames */
  if (request->unanswered == 0 && !request->node.queued) request_end(request);
  return NULL;
}

/* Records that received data can't be stored, because its destination is freed or protected. The link then discards the
 * rest of the frame's data. */
static void note_fault(ProxycclLink *link, const struct iovec *blocks) {
  Receiving *in = &link->in;
  const char *address = (char *)blocks[in->at.index].iov_base + in->at.offset;
  if (link->serves) { /* the answer reports the fault to the peer */
    in->error = is_mapped(address) ? EPERM : EFAULT;
    in->block = in->at.index;
    in->blocks = NULL;
    return;
  }
  request_refuse(link, link->awaited[link->oldest % WINDOW].request, in->at.index, address);
}

/* Receives data into its blocks, or discards it. Returns the number of received bytes. */
static size_t take_data(ProxycclLink *link) {
  Receiving *in = &link->in;
  const struct iovec *blocks = in->blocks;
  uint64_t count = in->count;
  if (!link->serves) {
    Request *request = link->awaited[link->oldest % WINDOW].request;
    const int wanted = request != NULL && request->refusal == 0 && request_stands(request);
    blocks = wanted ? request->local : NULL;
    count = wanted ? request->count : 0;
  } else {
    if (blocks != NULL && in->memory != link->agent->memory) check_write(link);
    blocks = in->blocks;
    if (blocks != NULL && in->stage != NULL) {
      blocks = &in->staged;
      count = 1;
    }
  }
  if (blocks == NULL) return take(link, NULL, in->left);
  const ssize_t taken = take_out(link, blocks, count, in->at, in->left);
  if (taken < 0) {
    note_fault(link, blocks);
    return take(link, NULL, in->left);
  }
  blocks_advance(blocks, &in->at, (uint64_t)taken);
  return (size_t)taken;
}

/* Extends a body's buffer, in proportion to the bytes that have arrived. Returns 0 if out of memory. */
static int extend_body(Receiving *in) {
  const uint64_t left = in->body_bytes - in->body.used, step = in->body.used + AHEAD_BYTES;
  return buffer_extend(&in->body, left < step ? left : step) != NULL;
}

/* Receives bytes of the current part. Returns the number of received bytes, which is 0 if the socket is empty, or if
 * the link must end; *problem is then the reason. */
static size_t take_part(ProxycclLink *link, const char **problem) {
  Receiving *in = &link->in;
  if (in->part == IN_DATA) return take_data(link);
  if (in->part != IN_BODY) return take(link, (char *)(&in->frame + 1) - in->left, in->left);
  const uint64_t have = in->body_bytes - in->left;
  if (have == in->body.used && !extend_body(in)) {
    *problem = OUT_OF_MEMORY;
    return 0;
  }
  return take(link, in->body.bytes + have, in->body.used - have);
}

/* Advances to the next part once the current part is complete. Returns the reason if the link must end, else NULL. */
static const char *next_part(ProxycclLink *link) {
  Receiving *in = &link->in;
  const FramePart ended = in->part;
  in->part = IN_HEAD;
  in->left = sizeof in->frame;
  switch (ended) {
    case IN_TAIL:
      if (in->frame.kind != FRAME_ANSWER || in->frame.bytes >= FRAME_BLOCKS) return "the peer sent an invalid frame";
      return end_data(link);
    case IN_DATA:
      if (link->serves || in->frame.count != 0 || in->frame.bytes == 0) return end_data(link);
      in->part = IN_TAIL;
      return NULL;
    case IN_BODY:
      return take_body(link);
    default:
      break;
  }
  if (in->body.room > 1 << 20) buffer_free(&in->body);
  in->body.used = 0;
  in->part = IN_BODY;
  const int64_t bytes = body_of(link, &in->frame);
  if (bytes < 0) return "the peer sent an invalid frame";
  in->left = in->body_bytes = (uint64_t)bytes;
  return NULL;
}

/* Receives bytes of the current part, and handles the part's end. Returns 0 if the socket is empty or the link is lost,
 * else 1. Handles a following part of 0 bytes immediately, because no further byte may arrive. */
static int step(ProxycclLink *link, uint64_t *turn) {
  const char *problem = NULL;
  const size_t taken = take_part(link, &problem);
  link->in.left -= taken;
  *turn += taken;
  if (problem == NULL && (taken == 0 || link->lost != NULL)) return 0;
  while (problem == NULL && link->lost == NULL && link->in.left == 0) problem = next_part(link);
  if (problem != NULL) link_lose(link, problem);
  return link->lost == NULL;
}

void link_ready(ProxycclLink *link, uint32_t events) {
  uint64_t turn = 0;
  if (link->lost != NULL) return;
  if (events & (EPOLLIN | EPOLLHUP | EPOLLERR)) {
    while (step(link, &turn) && turn < TURN_BYTES) {}
    /* Handles all data that was read ahead, because no event wakes the thread for data that has left the socket. */
    while (link->lost == NULL && link->ahead_at < link->ahead_end && step(link, &turn)) {}
  }
  if (link->lost == NULL) link_send(link);
}

/* Leaves the socket to polling callers, until link_wake. */
static void rest(ProxycclLink *link) {
  if (link->resting) return;
  link->resting = 1;
  ++link->agent->resting;
  link_watch(link, 0);
}

void link_look(ProxycclLink *link) {
  struct pollfd ended = {.fd = link->process, .events = POLLIN};
  link_ready(link, EPOLLIN);
  if (link->lost == NULL && link->process >= 0 && poll(&ended, 1, 0) > 0) {
    link_lose(link, "the peer's process has ended");
  }
}

void link_help(ProxycclLink *link) {
  link_ready(link, EPOLLIN);
  link->helped = 1;
}

void link_watched(ProxycclLink *link, uint32_t events) {
  if (link->helped && (events & (EPOLLHUP | EPOLLERR)) == 0) {
    rest(link);
  } else {
    link_ready(link, events);
  }
}

int proxyccl_ask_to_copy(int socket, const char *secret, int timeout_ms) {
  struct {
    Frame frame;
    char secret[PROXYCCL_SECRET_BYTES];
  } question = {.frame = {FRAME_PERMIT, VERSION, PROXYCCL_SECRET_BYTES}};
  Frame answered;
  memcpy(question.secret, secret, PROXYCCL_SECRET_BYTES);
  if (send(socket, &question, sizeof question, MSG_NOSIGNAL) != sizeof question) return EPIPE;
  struct pollfd ready = {.fd = socket, .events = POLLIN};
  if (poll(&ready, 1, timeout_ms) != 1) return ETIMEDOUT;
  /* The answer is the only frame that the peer sends on this connection. */
  if (recv(socket, &answered, sizeof answered, MSG_DONTWAIT) != sizeof answered) return EPIPE;
  return answered.kind == FRAME_ANSWER ? (int)answered.count : EPROTO;
}

void proxyccl_link_look(ProxycclLink *link) {
  pthread_mutex_lock(&link->agent->lock);
  link_look(link);
  pthread_mutex_unlock(&link->agent->lock);
}
