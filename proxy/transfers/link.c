/* Links: sockets between agents, and the frames on them. See transfers.h and parts.h.
 *
 * The side that opened a link sends greetings, messages and requests; the other side only answers. An answer needs no
 * room in the opener's window, and the opener always reads, so neither side waits for the other to read. Data moves
 * directly from and to the blocks, except for data that was read from the socket together with a head.
 */
#include <errno.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include "parts.h"

enum {
  ANSWER_STEPS = 3, /* steps of a FETCH or a STORE: between peer and stage, between stage and device, the end */
  VERSION = 2,
  LONGEST_NAME = 4096,
  TURN_BYTES = 2 << 20 /* most bytes that a link sends or receives in its turn */
};

const char *proxyccl_link_lost(const ProxycclLink *link) { return __atomic_load_n(&link->lost, __ATOMIC_ACQUIRE); }

/* Closes a descriptor, after its removal from the epoll set: a copy in a fork's child would keep it there. */
static void unwatch(ProxycclAgent *agent, int *descriptor) {
  if (*descriptor < 0) return;
  agent_watch(agent, *descriptor, 0, EPOLL_CTL_DEL, 0);
  close(*descriptor);
  *descriptor = -1;
}

ProxycclLink *link_new(ProxycclAgent *agent, int socket, int process, int serves) {
  ProxycclLink *link = calloc(1, sizeof *link);
  char *ahead = malloc(AHEAD_BYTES);
  int error = agent->stopped ? ECANCELED : link == NULL || ahead == NULL ? ENOMEM : 0;
  if (error == 0) error = agent_watch(agent, socket, (uintptr_t)link, EPOLL_CTL_ADD, EPOLLIN);
  if (error == 0 && process >= 0) {
    error = agent_watch(agent, process, (uintptr_t)link | TAG_PROCESS, EPOLL_CTL_ADD, EPOLLIN);
  }
  if (error != 0) {
    unwatch(agent, &socket);
    unwatch(agent, &process);
    free(link);
    free(ahead);
    errno = error;
    return NULL;
  }
  link->agent = agent;
  link->socket = socket;
  link->process = process;
  link->serves = serves;
  link->references = serves ? 0 : 1;
  link->ahead = ahead;
  link->next = agent->links;
  agent->links = link;
  ++agent->references;
  return link;
}

/* Starts to watch the socket for events. */
static void watch(ProxycclLink *link, uint32_t events) {
  if (agent_watch(link->agent, link->socket, (uintptr_t)link, EPOLL_CTL_MOD, events) != 0) {
    link_lose(link, "epoll cannot watch the link's socket");
  }
}

/* Leaves the socket to polling callers, until link_wake. */
static void rest(ProxycclLink *link) {
  if (link->resting) return;
  link->resting = 1;
  ++link->agent->resting;
  watch(link, 0);
}

void link_wake(ProxycclLink *link) {
  link->helped = 0;
  if (!link->resting) return;
  link->resting = 0;
  --link->agent->resting;
  if (link->lost != NULL) return;
  watch(link, EPOLLIN | (link->writable ? EPOLLOUT : 0));
}

/* Ends a request, unless it has ended. */
static void end_request(Request *request) {
  if (!request->active) return;
  request->active = 0;
  request->ended(request);
}

static void end_sending(ProxycclLink *link) {
  if (link->out.stage != NULL) stage_give(link->out.stage);
  free(link->out.own);
  link->out.stage = NULL;
  link->out.own = NULL;
  link->out.request = NULL;
  link->out.answer = NULL;
  link->out.head.used = link->out.sent = 0;
  link->out.left = link->out.tail_left = 0;
}

void link_lose(ProxycclLink *link, const char *reason) {
  ProxycclAgent *agent = link->agent;
  if (link->lost != NULL) return;
  __atomic_store_n(&link->lost, reason, __ATOMIC_RELEASE);
  link_wake(link);
  unwatch(agent, &link->socket);
  unwatch(agent, &link->process);
  end_sending(link);
  for (Request *request; (request = queue_pop(&link->requests)) != NULL;) end_request(request);
  for (; link->unanswered > 0; --link->unanswered) {
    Request *request = link->awaited[link->oldest++ % WINDOW].request;
    if (request != NULL) end_request(request);
  }
  for (Node *each = agent->copies.first, *next; each != NULL; each = next) {
    ProxycclTransfer *transfer = (ProxycclTransfer *)each;
    next = each->next;
    if (transfer->link == link) transfer->path->lose(transfer);
  }
  fabric_lose(link);
  if (!link->serves && agent->losses >= 0) {
    const uint64_t one = 1;
    const ssize_t written = write(agent->losses, &one, sizeof one);
    (void)written; /* an eventfd refuses only a value that would overflow it, and then its reader wakes anyway */
  }
  if (link->in.stage != NULL) stage_give(link->in.stage);
  link->in.stage = NULL;
  for (Answer *answer; (answer = queue_pop(&link->answers)) != NULL; free(answer)) {
    if (answer->stage != NULL) stage_give(answer->stage);
  }
}

void link_free(ProxycclLink *link) {
  if (link->addressed) fabric_forget(link);
  --link->agent->references;
  buffer_free(&link->messages);
  buffer_free(&link->out.head);
  buffer_free(&link->in.body);
  free(link->ahead);
  free(link->name);
  free(link);
}

void link_unreference(ProxycclLink *link) {
  ProxycclAgent *agent = link->agent;
  if (--link->references > 0 || link->lost == NULL) return;
  if (!agent->stopped) {
    agent_wake(agent); /* events that its thread has received may still name the link */
    return;
  }
  ProxycclLink **at = &agent->links;
  while (*at != link) at = &(*at)->next;
  *at = link->next;
  link_free(link);
}

/* Sending */

int link_append(ProxycclLink *link, FrameKind kind, uint32_t count, const void *first, uint64_t first_bytes,
                const void *second, uint64_t second_bytes) {
  Buffer *messages = &link->messages;
  const Frame frame = {kind, count, first_bytes + second_bytes};
  if (link->lost != NULL) return ENOTCONN;
  if (messages->used > PROXYCCL_MOST_UNSENT) return ENOBUFS;
  const size_t before = messages->used;
  if (buffer_append(messages, &frame, sizeof frame) && buffer_append(messages, first, first_bytes) &&
      buffer_append(messages, second, second_bytes)) {
    return 0;
  }
  messages->used = before;
  return ENOMEM;
}

/* Turns the answer to a READ into an error if the blocks are no longer registered. */
static void check_answer(const ProxycclLink *link, Answer *answer) {
  Device *device;
  const uint64_t lacking = agent_lacks(link->agent, answer->blocks, answer->count, &device);
  if (lacking == answer->count && device == answer->device) return;
  answer->error = EACCES;
  answer->bytes = lacking < answer->count ? lacking : 0;
}

/* Advances a FETCH or a STORE as far as possible. */
static void feed_by_fabric(ProxycclLink *link, Answer *answer) {
  while (answer->error == 0 && answer->steps < ANSWER_STEPS && (answer->stage == NULL || !answer->stage->copying)) {
    if (answer->stage != NULL && answer->stage->status != 0) {
      answer->error = EIO;
      return;
    }
    if (answer->steps < ANSWER_STEPS - 1) check_answer(link, answer);
    if (answer->error != 0) return;
    if (answer->stage == NULL && (answer->stage = stage_take_pinned(link, answer->device)) == NULL) return;
    ++answer->steps;
    if (answer->steps == ANSWER_STEPS) return;
    if ((answer->steps == 1) == answer->fetches) {
      stage_carry(answer->stage, !answer->fetches, answer->data, &answer->origin);
    } else {
      stage_copy(answer->stage, answer->fetches, answer->blocks, answer->count);
    }
  }
}

/* Starts devices' copies of the next answers' data into stages. */
static void feed_answers(ProxycclLink *link) {
  uint32_t fed = 0;
  for (Node *each = link->answers.first; each != NULL && fed < FED; each = each->next) {
    Answer *answer = (Answer *)each;
    if (answer->device == NULL || answer->error != 0) continue;
    ++fed;
    if (answer->by_fabric) {
      feed_by_fabric(link, answer);
      continue;
    }
    if (answer->stage != NULL) continue;
    check_answer(link, answer);
    if (answer->error != 0) continue;
    answer->stage = stage_take(link, answer->device);
    if (answer->stage == NULL) {
      answer->error = ENOMEM;
      answer->bytes = 0;
      continue;
    }
    answer->staged = (struct iovec){answer->stage->memory, answer->bytes};
    stage_copy(answer->stage, 0, answer->blocks, answer->count);
  }
}

static int is_ready(const Answer *answer) {
  if (answer->by_fabric) return answer->error != 0 || answer->steps == ANSWER_STEPS;
  return answer->stage == NULL ? answer->device == NULL || answer->error != 0 : !answer->stage->copying;
}

/* Begins the answer to the oldest request. */
static int begin_answer(ProxycclLink *link) {
  Sending *out = &link->out;
  Answer *answer = queue_pop(&link->answers);
  --link->answer_count;
  if (answer->error == 0 && answer->stage == NULL) check_answer(link, answer);
  if (answer->stage != NULL && answer->stage->status != 0) {
    answer->error = EIO;
    answer->bytes = 0;
  }
  const Frame frame = {FRAME_ANSWER, answer->error, answer->bytes};
  out->own = answer;
  out->answer = answer;
  out->stage = answer->stage;
  out->blocks = answer->stage != NULL ? &answer->staged : answer->blocks;
  out->count = answer->stage != NULL ? 1 : answer->count;
  out->at = (Position){0, 0};
  out->left = answer->error == 0 ? frame.bytes : 0;
  out->memory = link->agent->memory;
  out->tail = (Frame){FRAME_ANSWER, 0, 0};
  out->tail_left = out->left > 0 ? sizeof out->tail : 0;
  return buffer_append(&out->head, &frame, sizeof frame);
}

/* Returns the number of the first block whose first or last byte is not mapped, or `count`. */
static uint64_t find_unmapped(const struct iovec *blocks, uint64_t count) {
  uint64_t i = 0;
  while (i < count && is_mapped(blocks[i].iov_base) && is_mapped((char *)blocks[i].iov_base + blocks[i].iov_len - 1)) {
    ++i;
  }
  return i;
}

/* Begins the next frame of the next request. */
static int begin_request(ProxycclLink *link) {
  Sending *out = &link->out;
  Request *request = queue_pop(&link->requests);
  struct iovec blocks[FRAME_BLOCKS];
  uint32_t count;
  if (request->asks) {
    const struct iovec block = {(void *)(uintptr_t)request->fault.address, 1};
    const Frame check = {FRAME_CHECK, 1, 1};
    link->awaited[(link->oldest + link->unanswered++) % WINDOW] = (Awaited){request, {0, 0}, 0};
    ++request->unanswered;
    return buffer_append(&out->head, &check, sizeof check) && buffer_append(&out->head, &block, sizeof block);
  }
  const uint64_t bytes =
      blocks_parts(request->remote, request->count, request->at, FRAME_BYTES, FRAME_BLOCKS, blocks, &count);
  const int by_fabric = request->origin != NULL;
  const FrameKind kind =
      request->writes ? (by_fabric ? FRAME_FETCH : FRAME_WRITE) : (by_fabric ? FRAME_STORE : FRAME_READ);
  const Frame frame = {kind, count, bytes};
  link->awaited[(link->oldest + link->unanswered++) % WINDOW] =
      (Awaited){request, request->at, request->writes || by_fabric ? 0 : bytes};
  ++request->unanswered;
  if (request->writes && !by_fabric) {
    out->request = request;
    out->blocks = request->local;
    out->count = request->count;
    out->at = request->at;
    out->left = bytes;
  }
  blocks_advance(request->remote, &request->at, bytes);
  request->left -= bytes;
  if (request->left > 0) queue_push(&link->requests, request);
  return buffer_append(&out->head, &frame, sizeof frame) && buffer_append(&out->head, blocks, count * sizeof *blocks) &&
         (!by_fabric || buffer_append(&out->head, request->origin, sizeof *request->origin));
}

/* Begins the next frame: all messages, else an answer, else a request. Returns 0 if there is none. */
static int begin_frame(ProxycclLink *link) {
  Sending *out = &link->out;
  end_sending(link);
  feed_answers(link);
  if (link->lost != NULL) return 0;
  if (link->messages.used > 0) {
    const Buffer emptied = out->head;
    out->head = link->messages;
    link->messages = emptied;
    return 1;
  }
  const Answer *answer = (const Answer *)link->answers.first;
  const int begun = answer != NULL && is_ready(answer)                          ? begin_answer(link)
                    : link->requests.first != NULL && link->unanswered < WINDOW ? begin_request(link)
                                                                                : -1;
  if (begun == 0) link_lose(link, "this process is out of memory");
  return begun > 0;
}

/* Replaces the unsent data by a copy, with zeros from the first unreadable byte on, or by zeros alone unless
 * `may_read`. Returns the unreadable byte, which lies in block *block, or NULL. Loses the link if out of memory. */
static const char *copy_rest(ProxycclLink *link, int may_read, uint64_t *block) {
  Sending *out = &link->out;
  const char *unread = NULL;
  struct iovec *copy = calloc(1, sizeof *copy + out->left);
  if (copy == NULL) {
    link_lose(link, "this process is out of memory");
    return NULL;
  }
  *copy = (struct iovec){copy + 1, out->left};
  for (uint64_t done = 0; may_read && done < out->left && unread == NULL;) {
    struct iovec part;
    uint32_t count;
    const uint64_t bytes = blocks_parts(out->blocks, out->count, out->at, out->left - done, 1, &part, &count);
    const struct iovec room = {(char *)(copy + 1) + done, bytes};
    const uint64_t copied = guard_copy(&room, &part, 1, bytes);
    if (copied < bytes) unread = (char *)part.iov_base + copied;
    *block = out->at.index;
    blocks_advance(out->blocks, &out->at, copied);
    done += copied;
  }
  free(out->own);
  out->own = copy;
  out->request = NULL;
  out->answer = NULL;
  out->blocks = copy;
  out->count = 1;
  out->at = (Position){0, 0};
  return unread;
}

/* Stops a request whose local memory can't be read or written. The request ends with its last answer. */
static void refuse(ProxycclLink *link, Request *request, uint64_t block, const char *address) {
  const uint64_t offset = (uint64_t)(address - (const char *)request->local[block].iov_base);
  const char *theirs = (char *)request->remote[block].iov_base + offset;
  request->refusal = EPERM;
  request->fault = is_mapped(address) ? (ProxycclFault){PROXYCCL_FAULT_PROTECTED, (uintptr_t)theirs}
                                      : (ProxycclFault){PROXYCCL_FAULT_FREED_HERE, (uintptr_t)address};
  queue_remove(&link->requests, request);
}

/* Turns the answer that is being sent into an error, in its second head, or in its first head if that is unsent. */
static void spoil_answer(Sending *out, uint32_t error, uint64_t block) {
  const Frame frame = {FRAME_ANSWER, error, block};
  if (out->sent > 0) {
    out->tail = frame;
    return;
  }
  memcpy(out->head.bytes, &frame, sizeof frame);
  out->left = out->tail_left = 0;
}

/* Sends zeros for the rest of a frame whose data the kernel could not read. */
static void spoil(ProxycclLink *link) {
  Sending *out = &link->out;
  Request *request = out->request;
  uint64_t block = 0;
  const char *unread = copy_rest(link, 1, &block);
  if (unread == NULL) return; /* the link is lost, or the memory is mapped again */
  if (request == NULL) {
    spoil_answer(out, is_mapped(unread) ? EPERM : EFAULT, block);
    return;
  }
  refuse(link, request, block, unread);
  if (out->sent > 0) return;
  end_sending(link); /* drops the frame, of which nothing has been sent */
  --link->unanswered;
  if (--request->unanswered == 0) end_request(request);
}

/* Checks the blocks of the current answer again after the registered memory has changed. */
static void check_sending(ProxycclLink *link) {
  Sending *out = &link->out;
  const Answer *answer = out->answer;
  const uint64_t count = answer->count;
  Device *device;
  uint64_t unused;
  const uint64_t lacking = agent_lacks(link->agent, answer->blocks, count, &device);
  out->memory = link->agent->memory;
  if (lacking == count && device == NULL) return;
  copy_rest(link, 0, &unused);
  if (link->lost == NULL) spoil_answer(out, EACCES, lacking < count ? lacking : 0);
}

/* Whether the frame that is being sent has more data or a second head. */
static int has_more(const Sending *out) { return out->sent < out->head.used || out->left > 0 || out->tail_left > 0; }

/* Advances the frame past bytes that were sent. */
static void note_sent(Sending *out, uint64_t sent) {
  const uint64_t head = out->head.used - out->sent, of_head = sent < head ? sent : head;
  const uint64_t of_data = sent - of_head < out->left ? sent - of_head : out->left;
  out->sent += of_head;
  blocks_advance(out->blocks, &out->at, of_data);
  out->left -= of_data;
  out->tail_left -= sent - of_head - of_data;
}

/* Sends until nothing is left to send or the socket is full. */
void link_send(ProxycclLink *link) {
  Sending *out = &link->out;
  struct iovec parts[2 + FRAME_BLOCKS];
  uint64_t turn = 0;
  int full = 0;
  while (link->lost == NULL && turn < TURN_BYTES && !full) {
    if (!has_more(out) && !begin_frame(link)) break;
    if (out->left > 0 && out->answer != NULL && out->stage == NULL && out->memory != link->agent->memory) {
      check_sending(link);
      continue;
    }
    uint32_t count = 0;
    parts[0] = (struct iovec){out->head.bytes + out->sent, out->head.used - out->sent};
    if (out->left > 0) blocks_parts(out->blocks, out->count, out->at, out->left, FRAME_BLOCKS, parts + 1, &count);
    if (out->tail_left > 0) parts[++count] = (struct iovec){(char *)(&out->tail + 1) - out->tail_left, out->tail_left};
    const struct msghdr message = {.msg_iov = parts, .msg_iovlen = 1 + count};
    const ssize_t sent = sendmsg(link->socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0) {
      if (errno == EINTR) continue;
      if (errno == EFAULT) {
        spoil(link);
        continue;
      }
      full = errno == EAGAIN;
      if (!full) link_lose(link, "the peer has closed the link");
      continue;
    }
    note_sent(out, (uint64_t)sent);
    turn += (uint64_t)sent;
  }
  if (link->lost != NULL) return;
  const int writable = has_more(out) || turn >= TURN_BYTES;
  if (writable == link->writable) return;
  link->writable = writable;
  if (link->resting) return;
  watch(link, EPOLLIN | (writable ? EPOLLOUT : 0));
}

void link_start(ProxycclLink *link, Request *request, uint64_t bytes, const ProxycclFault *asked) {
  request->at = (Position){0, 0};
  request->left = bytes;
  request->unanswered = request->refusal = 0;
  request->asks = asked != NULL;
  request->fault = asked != NULL ? *asked : (ProxycclFault){PROXYCCL_FAULT_NONE, 0};
  request->active = 1;
  if (link->lost != NULL) {
    end_request(request);
  } else {
    queue_push(&link->requests, request);
    link_send(link);
  }
}

void link_forget(ProxycclLink *link, Request *request) {
  Sending *out = &link->out;
  request->active = 0;
  queue_remove(&link->requests, request);
  for (uint32_t i = 0; i < link->unanswered; ++i) {
    Awaited *awaited = &link->awaited[(link->oldest + i) % WINDOW];
    if (awaited->request == request) awaited->request = NULL;
  }
  if (out->request != request) return;
  uint64_t unused;
  copy_rest(link, 1, &unused); /* the request's memory may be freed after this call, or before it */
}

/* Receiving */

/* Loses a link whose socket returned an end or an error, except EAGAIN. */
static void lose_at_end(ProxycclLink *link, ssize_t got) {
  if (got < 0 && errno == EAGAIN) return;
  link_lose(link, got == 0 || errno == ECONNRESET ? "the peer has closed the link" : "the peer's host does not answer");
}

/* Reads ahead if no data is left from an earlier read. Returns 0 if the socket is empty or the link is lost. */
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

/* Receives bytes, and discards them if `to` is NULL. Returns 0 if the socket is empty or the link is lost. */
static size_t take(ProxycclLink *link, void *to, size_t bytes) {
  if (!read_ahead(link)) return 0;
  const size_t ready = link->ahead_end - link->ahead_at;
  const size_t taken = bytes < ready ? bytes : ready;
  if (to != NULL) memcpy(to, link->ahead + link->ahead_at, taken);
  link->ahead_at += taken;
  return taken;
}

/* Copies to blocks. Returns the copied bytes: fewer than `bytes` if the next byte can't be written. */
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

/* Receives bytes into a program's memory, and reads ahead. Returns -1, and receives nothing, if that memory can't be
 * written; 0 as `take` does. */
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
    if (got == 0 || errno != EFAULT) { /* after EFAULT, copy_out finds the faulty byte */
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

/* Returns the bytes of a frame's body, or -1 if the frame is not valid here. */
static int64_t body_of(const ProxycclLink *link, const Frame *frame) {
  if (!link->serves) {
    if (frame->kind != FRAME_ANSWER || link->unanswered == 0) return -1;
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
  if (frame->kind == FRAME_ADDRESS) return frame->bytes <= LONGEST_ADDRESS ? (int64_t)frame->bytes : -1;
  const int by_fabric = frame->kind == FRAME_FETCH || frame->kind == FRAME_STORE;
  if (!by_fabric && frame->kind != FRAME_WRITE && frame->kind != FRAME_READ && frame->kind != FRAME_CHECK) return -1;
  if (frame->count < 1 || frame->count > FRAME_BLOCKS || frame->bytes > FRAME_BYTES || link->answer_count > WINDOW)
    return -1;
  return (int64_t)(frame->count * sizeof(struct iovec) + (by_fabric ? sizeof(Origin) : 0));
}

/* Queues an answer. Returns NULL if out of memory. */
static Answer *answer(ProxycclLink *link, uint32_t error, uint64_t bytes, const struct iovec *blocks, uint64_t count) {
  Answer *made = malloc(sizeof *made + count * sizeof *blocks);
  if (made == NULL) return NULL;
  *made = (Answer){.error = error, .bytes = bytes, .count = count};
  if (count > 0) memcpy(made->blocks, blocks, count * sizeof *blocks);
  queue_push(&link->answers, made);
  ++link->answer_count;
  return made;
}

/* Whether the blocks of a peer's request add up to `bytes`. */
static int blocks_have(const struct iovec *blocks, uint64_t count, uint64_t bytes) {
  for (uint64_t i = 0; i < count; ++i) {
    if (blocks[i].iov_len == 0 || blocks[i].iov_len > bytes) return 0;
    bytes -= blocks[i].iov_len;
  }
  return bytes == 0;
}

/* Permits the peer's process to copy from and to this one. Yama records one permitted process, so for a second peer
 * this function permits every process that could otherwise trace this one. Returns 0 or an errno, EINVAL without Yama.
 */
static int permit(const ProxycclLink *link) {
  static pid_t permitted; /* atomic: agents of one process share it */
  struct ucred peer;
  socklen_t size = sizeof peer;
  if (!link->agent->copied) return EPERM;
  if (getsockopt(link->socket, SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0) return errno;
  if (peer.pid <= 0) return ESRCH; /* a peer in another PID namespace, or not a Unix socket */
  pid_t before = 0;
  const int only = __atomic_compare_exchange_n(&permitted, &before, peer.pid, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED) ||
                   before == peer.pid;
  return prctl(PR_SET_PTRACER, only ? (unsigned long)peer.pid : PR_SET_PTRACER_ANY, 0, 0, 0) == 0 ? 0 : errno;
}

/* Handles the complete body of a FETCH or a STORE. */
static const char *take_by_fabric(ProxycclLink *link, const struct iovec *blocks, Device *device) {
  const Receiving *in = &link->in;
  Answer *made = answer(link, 0, 0, blocks, in->frame.count);
  if (made == NULL) return "this process is out of memory";
  made->by_fabric = 1;
  made->fetches = in->frame.kind == FRAME_FETCH;
  made->data = in->frame.bytes;
  made->device = device;
  memcpy(&made->origin, blocks + in->frame.count, sizeof made->origin);
  if (in->block < in->frame.count) {
    made->error = EACCES;
    made->bytes = in->block;
  } else if (device == NULL || !device->staging->by_fabric || !link->addressed) {
    made->error = EHOSTUNREACH;
  }
  return NULL;
}

/* Handles a complete body. Returns why the link must end, or NULL. */
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
      return answer(link, (uint32_t)permit(link), 0, NULL, 0) != NULL ? NULL : "this process is out of memory";
    }
    link->name_bytes = (uint32_t)(in->body.used - PROXYCCL_SECRET_BYTES);
    link->name = malloc(link->name_bytes);
    if (link->name == NULL) return "this process is out of memory";
    memcpy(link->name, in->body.bytes + PROXYCCL_SECRET_BYTES, link->name_bytes);
    link->greeted = 1;
  } else if (frame->kind == FRAME_ADDRESS) {
    link->addressed |= fabric_know(link, in->body.bytes, in->body.used);
  } else if (frame->kind == FRAME_MESSAGE) {
    if (agent_receive(agent, link->name, link->name_bytes, in->body.bytes, in->body.used) != 0)
      return "this process is out of memory";
  } else if (frame->kind == FRAME_ANSWER) {
    in->at = link->awaited[link->oldest % WINDOW].at;
    in->left = frame->count == 0 ? frame->bytes : 0;
    in->part = IN_DATA;
  } else {
    const struct iovec *blocks = (const struct iovec *)in->body.bytes; /* malloc's alignment */
    if (!blocks_have(blocks, frame->count, frame->bytes)) return "the peer sent an invalid request";
    Device *device;
    in->block = agent_lacks(agent, blocks, frame->count, &device);
    if (frame->kind == FRAME_FETCH || frame->kind == FRAME_STORE) return take_by_fabric(link, blocks, device);
    if (frame->kind == FRAME_READ) {
      Answer *made = answer(link, 0, frame->bytes, blocks, frame->count);
      if (made == NULL) return "this process is out of memory";
      made->device = device;
      return NULL;
    }
    if (frame->kind == FRAME_CHECK) {
      uint32_t error = in->block < frame->count ? EACCES : 0;
      if (error == 0 && device == NULL) { /* the CPU may not be able to access device memory */
        in->block = find_unmapped(blocks, frame->count);
        if (in->block < frame->count) error = EFAULT;
      }
      return answer(link, error, error != 0 ? in->block : 0, NULL, 0) != NULL ? NULL : "this process is out of memory";
    }
    in->error = in->block == frame->count ? 0 : EACCES;
    in->blocks = in->error == 0 ? blocks : NULL;
    in->count = frame->count;
    if (in->error == 0 && device != NULL) {
      in->stage = stage_take(link, device);
      if (in->stage == NULL) return "this process is out of memory";
      in->staged = (struct iovec){in->stage->memory, frame->bytes};
    }
    in->at = (Position){0, 0};
    in->memory = agent->memory;
    in->left = frame->bytes;
    in->part = IN_DATA;
  }
  return NULL;
}

/* Discards the data of a WRITE whose blocks are no longer registered. */
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

/* Handles the end of a frame's data. */
static const char *end_data(ProxycclLink *link) {
  Receiving *in = &link->in;
  if (link->serves) {
    Stage *stage = in->stage;
    if (stage != NULL && in->blocks != NULL) check_write(link);
    Answer *made = answer(link, in->error, in->error != 0 ? in->block : 0, NULL, 0);
    if (made == NULL) return "this process is out of memory";
    in->stage = NULL;
    if (stage != NULL && in->error == 0) {
      made->stage = stage; /* sent only after the copies from the stage */
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
    const uint64_t block = at.index + in->frame.bytes; /* a frame may begin in the middle of its first block */
    if (!request->asks && block < request->count) {
      char *address = request->remote[block].iov_base;
      request->fault.address = (uintptr_t)(in->frame.bytes == 0 ? address + at.offset : address);
    }
  }
  if (request->refusal != 0) queue_remove(&link->requests, request); /* a refused request sends no more frames */
  if (request->unanswered == 0 && !request->node.queued) end_request(request);
  return NULL;
}

/* Records that the destination of data is freed or protected, and discards the rest of the frame's data. */
static void note_fault(ProxycclLink *link, const struct iovec *blocks) {
  Receiving *in = &link->in;
  const char *address = (char *)blocks[in->at.index].iov_base + in->at.offset;
  if (link->serves) { /* the answer reports the fault to the peer */
    in->error = is_mapped(address) ? EPERM : EFAULT;
    in->block = in->at.index;
    in->blocks = NULL;
    return;
  }
  refuse(link, link->awaited[link->oldest % WINDOW].request, in->at.index, address);
}

/* Receives data into its blocks. Returns the received bytes. */
static size_t take_data(ProxycclLink *link) {
  Receiving *in = &link->in;
  const struct iovec *blocks = in->blocks;
  uint64_t count = in->count;
  if (!link->serves) {
    const Request *request = link->awaited[link->oldest % WINDOW].request;
    const int wanted = request != NULL && request->refusal == 0;
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

/* Extends the memory of a body in proportion to the bytes that have arrived. */
static int extend_body(Receiving *in) {
  const uint64_t left = in->body_bytes - in->body.used, step = in->body.used + AHEAD_BYTES;
  return buffer_extend(&in->body, left < step ? left : step) != NULL;
}

/* Returns the bytes that are missing from the part that is being received. */
static uint64_t lacks(const Receiving *in) {
  switch (in->part) {
    case IN_DATA:
      return in->left;
    case IN_BODY:
      return in->body_bytes - in->have;
    default:
      return sizeof in->frame - in->have;
  }
}

/* Receives bytes of the current part. Returns 0 if the socket is empty, or if *problem says why the link must end. */
static size_t take_part(ProxycclLink *link, const char **problem) {
  Receiving *in = &link->in;
  const int in_body = in->part == IN_BODY;
  if (in->part == IN_DATA) {
    const size_t taken = take_data(link);
    in->left -= taken;
    return taken;
  }
  if (in_body && in->have == in->body.used && !extend_body(in)) {
    *problem = "this process is out of memory";
    return 0;
  }
  char *to = in_body ? in->body.bytes : (char *)&in->frame;
  const size_t taken = take(link, to + in->have, (in_body ? in->body.used : sizeof in->frame) - in->have);
  in->have += taken;
  return taken;
}

/* Advances to the next part once the current one is complete. Returns why the link must end, or NULL. */
static const char *next_part(ProxycclLink *link) {
  Receiving *in = &link->in;
  const FramePart ended = in->part;
  in->part = IN_HEAD;
  in->have = 0;
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
  in->body_bytes = (uint64_t)bytes;
  return NULL;
}

/* Receives bytes of one part, and handles the part's end. Returns 0 if the socket is empty. A part of 0 bytes ends
 * together with the part before it, without waiting for a further byte. */
static int step(ProxycclLink *link, uint64_t *turn) {
  const char *problem = NULL;
  const size_t taken = take_part(link, &problem);
  *turn += taken;
  if (problem == NULL && (taken == 0 || link->lost != NULL)) return 0;
  while (problem == NULL && link->lost == NULL && lacks(&link->in) == 0) problem = next_part(link);
  if (problem != NULL) link_lose(link, problem);
  return link->lost == NULL;
}

void link_ready(ProxycclLink *link, uint32_t events) {
  uint64_t turn = 0;
  if (link->lost != NULL) return;
  if (events & (EPOLLIN | EPOLLHUP | EPOLLERR)) {
    while (step(link, &turn) && turn < TURN_BYTES) {}
    /* Handles all data that was read ahead, which would not wake the thread again. */
    while (link->lost == NULL && link->ahead_at < link->ahead_end && step(link, &turn)) {}
  }
  if (link->lost == NULL) link_send(link);
}

void links_feed(ProxycclAgent *agent) {
  agent->feeds = agent->starved = 0;
  for (ProxycclLink *link = agent->links; link != NULL; link = link->next) {
    if (link->answers.first != NULL) link_send(link);
  }
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

/* Functions for callers */

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

ProxycclLink *proxyccl_link_create(ProxycclAgent *agent, int socket, const char *peer_secret, int process, int32_t pid,
                                   const char *address, uint64_t address_bytes) {
  pthread_mutex_lock(&agent->lock);
  ProxycclLink *link = link_new(agent, socket, process, 0);
  if (link != NULL) {
    link->pid = pid;
    if (link_append(link, FRAME_HELLO, VERSION, peer_secret, PROXYCCL_SECRET_BYTES, agent->name, strlen(agent->name)) ||
        (address_bytes > 0 && link_append(link, FRAME_ADDRESS, 0, address, address_bytes, NULL, 0))) {
      link_lose(link, "this process is out of memory");
    }
    link_send(link);
  }
  pthread_mutex_unlock(&agent->lock);
  return link;
}

const char *proxyccl_link_look(ProxycclLink *link) {
  pthread_mutex_lock(&link->agent->lock);
  link_look(link);
  pthread_mutex_unlock(&link->agent->lock);
  return proxyccl_link_lost(link);
}

void proxyccl_link_end(ProxycclLink *link) {
  pthread_mutex_lock(&link->agent->lock);
  link_lose(link, "the peer was removed");
  pthread_mutex_unlock(&link->agent->lock);
}

void proxyccl_link_release(ProxycclLink *link) {
  ProxycclAgent *agent = link->agent;
  pthread_mutex_lock(&agent->lock);
  link_lose(link, "the peer was removed");
  ++agent->references; /* held by this call */
  link_unreference(link);
  agent_unreference(agent);
}

int proxyccl_link_tell(ProxycclLink *link, const char *message, uint64_t bytes) {
  if (bytes > PROXYCCL_LONGEST_MESSAGE) return EMSGSIZE;
  pthread_mutex_lock(&link->agent->lock);
  const int error = link_append(link, FRAME_MESSAGE, 0, message, bytes, NULL, 0);
  link_send(link);
  pthread_mutex_unlock(&link->agent->lock);
  return error;
}
