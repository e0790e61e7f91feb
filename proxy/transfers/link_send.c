/* Sends a link's frames. See parts.h.
 *
 * The side that opened a link sends greetings, messages and requests; the other side only answers. The opener always
 * reads, and the limit on unanswered requests does not apply to answers, so neither side waits for the other to read.
 * Data is sent directly from the blocks.
 */
#include <errno.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include "parts.h"

enum {
  ANSWER_STEPS =
      3 /* steps of a FETCH or a STORE: the copy between peer and stage, the copy between stage and device, an answer */
};

/* Turns an answer into an error if the answer's blocks are no longer registered. */
static void check_answer(const ProxycclLink *link, Answer *answer) {
  Device *device;
  const uint64_t lacking = agent_lacks(link->agent, answer->blocks, answer->count, &device);
  if (lacking == answer->count && device == answer->device) return;
  answer->error = EACCES;
  answer->bytes = lacking < answer->count ? lacking : 0;
}

/* Begins further steps of a FETCH or a STORE, as far as possible without waiting. */
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

/* Advances at most FED answers from or to device memory, the oldest first: for a READ, starts the device's copy of the
 * data into a stage; for a FETCH or STORE, begins further steps. */
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

/* Begins to send the answer to the oldest request. Returns 0 if out of memory. */
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

/* Begins to send the next frame of the first request in the queue. Returns 0 if out of memory. */
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

/* Begins to send all messages if there are any, else an answer, else a frame of a request. Returns 0 if there is
 * nothing to send. */
static int begin_frame(ProxycclLink *link) {
  Sending *out = &link->out;
  link_end_sending(link);
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
  if (begun == 0) link_lose(link, OUT_OF_MEMORY);
  return begun > 0;
}

/* Replaces the unsent data by a copy. If `may_read` is 0, the copy consists of zeros; otherwise zeros replace the first
 * unreadable byte and all bytes after it. Returns the address of the first unreadable byte and sets *block to the
 * number of its block; returns NULL if there is none. If out of memory, ends the link and returns NULL. */
static const char *copy_rest(ProxycclLink *link, int may_read, uint64_t *block) {
  Sending *out = &link->out;
  const char *unread = NULL;
  struct iovec *copy = calloc(1, sizeof *copy + out->left);
  if (copy == NULL) {
    link_lose(link, OUT_OF_MEMORY);
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

void request_refuse(ProxycclLink *link, Request *request, uint64_t block, const char *address) {
  const uint64_t offset = (uint64_t)(address - (const char *)request->local[block].iov_base);
  const char *theirs = (char *)request->remote[block].iov_base + offset;
  request->refusal = EPERM;
  request->fault = is_mapped(address) ? (ProxycclFault){PROXYCCL_FAULT_PROTECTED, (uintptr_t)theirs}
                                      : (ProxycclFault){PROXYCCL_FAULT_FREED_HERE, (uintptr_t)address};
  queue_remove(&link->requests, request);
}

/* Makes the answer that is being sent report an error: in its second head if sending has begun, otherwise in its first
 * head. */
static void spoil_answer(Sending *out, uint32_t error, uint64_t block) {
  const Frame frame = {FRAME_ANSWER, error, block};
  if (out->sent > 0) {
    out->tail = frame;
    return;
  }
  memcpy(out->head.bytes, &frame, sizeof frame);
  out->left = out->tail_left = 0;
}

/* Drops the frame of a refused request if no byte of the frame has been sent. */
static void drop_unsent(ProxycclLink *link, Request *request) {
  if (link->out.sent > 0) return;
  link_end_sending(link);
  --link->unanswered;
  if (--request->unanswered == 0) request_end(request);
}

/* Handles data that the kernel could not read: replaces the rest of the frame's data by zeros, or drops the frame if no
 * byte has been sent. */
static void spoil(ProxycclLink *link) {
  Sending *out = &link->out;
  Request *request = out->request;
  uint64_t block = 0;
  const char *unread = copy_rest(link, 1, &block);
  if (unread == NULL) return; /* the link is lost, or the memory is readable again */
  if (request == NULL) {
    spoil_answer(out, is_mapped(unread) ? EPERM : EFAULT, block);
    return;
  }
  request_refuse(link, request, block, unread);
  drop_unsent(link, request);
}

/* Ends the sending of a WRITE after a registration of its memory has ended. If a part of the frame was sent, replaces
 * the rest of its data by zeros; otherwise drops the frame. */
static void withdraw(ProxycclLink *link) {
  Request *request = link->out.request;
  uint64_t unused;
  copy_rest(link, 0, &unused);
  if (link->lost != NULL) return;
  queue_remove(&link->requests, request);
  drop_unsent(link, request);
}

/* After a change of the registered ranges, checks again the blocks of the answer that is being sent. */
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

static int has_more(const Sending *out) { return out->sent < out->head.used || out->left > 0 || out->tail_left > 0; }

static void note_sent(Sending *out, uint64_t sent) {
  const uint64_t head = out->head.used - out->sent, of_head = sent < head ? sent : head;
  const uint64_t of_data = sent - of_head < out->left ? sent - of_head : out->left;
  out->sent += of_head;
  blocks_advance(out->blocks, &out->at, of_data);
  out->left -= of_data;
  out->tail_left -= sent - of_head - of_data;
}

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
    if (out->left > 0 && out->request != NULL && !request_stands(out->request)) {
      withdraw(link);
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
  link_watch(link, EPOLLIN | (writable ? EPOLLOUT : 0));
}

void link_start(ProxycclLink *link, Request *request, uint64_t bytes, const ProxycclFault *asked) {
  request->at = (Position){0, 0};
  request->left = bytes;
  request->unanswered = request->refusal = 0;
  request->asks = asked != NULL;
  request->fault = asked != NULL ? *asked : (ProxycclFault){PROXYCCL_FAULT_NONE, 0};
  request->active = 1;
  if (link->lost != NULL) {
    request_end(request);
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
  copy_rest(link, 1, &unused); /* copies the data, because the program may free the request's memory after this call */
}

void links_feed(ProxycclAgent *agent) {
  agent->feeds = agent->starved = 0;
  for (ProxycclLink *link = agent->links; link != NULL; link = link->next) {
    if (link->answers.first != NULL) link_send(link);
  }
}

ProxycclLink *proxyccl_link_create(ProxycclAgent *agent, int socket, const char *peer_secret, int process,
                                   int32_t pid) {
  pthread_mutex_lock(&agent->lock);
  ProxycclLink *link = link_new(agent, socket, process, 0);
  if (link != NULL) {
    link->pid = pid;
    if (link_append(link, FRAME_HELLO, VERSION, peer_secret, PROXYCCL_SECRET_BYTES, agent->name, strlen(agent->name))) {
      link_lose(link, OUT_OF_MEMORY);
    }
    link_send(link);
  }
  pthread_mutex_unlock(&agent->lock);
  return link;
}

uint32_t proxyccl_link_use_rails(ProxycclLink *link, const char *own, uint64_t own_bytes, const char *theirs,
                                 uint64_t their_bytes) {
  pthread_mutex_lock(&link->agent->lock);
  fabric_know(link, theirs, their_bytes);
  if (link_append(link, FRAME_ADDRESS, 0, own, own_bytes, NULL, 0)) link_lose(link, OUT_OF_MEMORY);
  link_send(link);
  pthread_mutex_unlock(&link->agent->lock);
  return link->rails;
}

int agent_tell(ProxycclAgent *agent, ProxycclLink *link, const char *message, uint64_t bytes) {
  if (link == NULL) return agent_receive(agent, agent->name, strlen(agent->name), message, bytes);
  const int error = link_append(link, FRAME_MESSAGE, 0, message, bytes, NULL, 0);
  link_send(link);
  return error;
}

int proxyccl_agent_tell(ProxycclAgent *agent, ProxycclLink *link, const char *message, uint64_t bytes) {
  if (bytes > PROXYCCL_LONGEST_MESSAGE) return EMSGSIZE;
  pthread_mutex_lock(&agent->lock);
  const int error = agent_tell(agent, link, message, bytes);
  pthread_mutex_unlock(&agent->lock);
  return error;
}
