/* Turns a call's arrays and options into *moves*: copies to a rank, from a rank or within this rank. With the group's
 * lock held, sorts the moves into launches, and fills in and issues each launch.
 *
 * A flow is one direction between a pair of ranks. An event is recorded after each launch. For each of its flows, a
 * launch waits for the event of the flow's latest launch. Waiting for the whole stream of that launch could deadlock,
 * because later work of the stream may wait for the peer. */
#include <stdlib.h>
#include <string.h>

#include "../../proxy/segment/calls.h"
#include "../../proxy/engine/order.h"
#include "calls.h"
#include "flows.h"
#include "stream_order.h"

enum { FEW_MOVES = 32, LASTS = 5 };
static const uintptr_t NO_STREAM = UINTPTR_MAX; /* the stream may be closed, so its handle is not kept */

/* Data that this rank sends (`target` is 0), receives (`source` is 0), or copies within itself. */
typedef struct Move {
  uint64_t key; /* the sort key of `order_moves` */
  uintptr_t source, target;
  uint64_t bytes;
  uint32_t peer;
} Move;

typedef struct Moves {
  size_t count, room; /* 0 at first */
  Move* each;         /* points to `few`, or to allocated memory */
  Move few[FEW_MOVES];
} Moves;

/* Describes the latest launch of a flow in one capture, or outside captures. */
typedef struct LastOfFlow {
  uint32_t event;   /* number, from 1, of the event recorded after the launch; 0 if there was no launch */
  uintptr_t stream; /* the stream of the launch, or NO_STREAM */
  uint64_t capture; /* the number of the capture, in which alone streams can wait for the event; 0 if not captured */
} LastOfFlow;

typedef struct Event {
  uintptr_t handle;
  uint32_t flows; /* the number of flows whose latest launch recorded this event; 0: the event can be reused */
} Event;

typedef struct FlowCalls {
  PyObject ob_base;
  PyObject* arguments;         /* the constructor's arguments, which own the objects that other fields borrow */
  PyObject *acquire, *release; /* owned references */
  ArrayTypes types;
  PyTypeObject *ndarray, *current_stream;
  PyObject *runtime, *failure;
  PyObject *refuse, *handle_of, *context, *keep, *make_event, *take_stream, *await;
  ProxycclLaunch* launch; /* NULL in a group of one rank, whose moves are copies by the driver */
  ProxycclFlows* flows;   /* the argument of `launch`; in a group of one rank, only `rank` and `world_size` are set */
  int (*copy)(void* dst, const void* src, size_t bytes, void* stream);
  uint64_t bytes_per_lane, bytes_at_once; /* a call takes a further lane for this number of bytes; the second is for
                                             calls in lines, of which a block's threads send this number at once */
  const ProxycclStreamOrder* streams;
  const ProxycclControl* control;
  uintptr_t thread_stream; /* the handle of the per-thread default stream; NO_STREAM if there is none */
  LastOfFlow* last;        /* LASTS for each flow: the first outside captures, the others in one capture each */
  uint32_t* turns;         /* for each flow, the number of its moves so far; used while moves are ordered */
  Event* events;           /* at most one for each item of `last`, and one for the call being issued */
  uint32_t event_count;
} FlowCalls;

static PyObject *state_name, *open_name; /* made once per process */

/* Returns the number of a move's flow: 2 * peer for receiving, 2 * peer + 1 for sending. */
static uint32_t flow_of(const Move* move) { return 2 * move->peer + (move->source != 0); }

/* Returns the latest launch of a move's flow in a capture. If there is none, returns the launch to replace, which is
 * of the capture that began first. */
static LastOfFlow* last_of(const FlowCalls* self, const Move* move, uint64_t capture) {
  LastOfFlow *each = &self->last[LASTS * flow_of(move)], *oldest = each + 1;
  for (int i = 0; i < LASTS; ++i) {
    if (each[i].capture == capture) return &each[i];
    if (i > 0 && each[i].capture < oldest->capture) oldest = &each[i];
  }
  return oldest;
}

/* -- moves --- */

/* Returns 0, or -1 with an exception. */
static int append(Moves* moves, const Move* move) {
  if (moves->room == 0) {
    moves->each = moves->few, moves->room = FEW_MOVES;
  } else if (moves->count == moves->room) {
    const size_t room = 2 * moves->room;
    Move* each = PyMem_Malloc(room * sizeof *each);
    if (each == NULL) {
      PyErr_NoMemory();
      return -1;
    }
    memcpy(each, moves->each, moves->count * sizeof *each);
    if (moves->each != moves->few) PyMem_Free(moves->each);
    moves->each = each, moves->room = room;
  }
  moves->each[moves->count++] = *move;
  return 0;
}

/* Adds a move, unless it is empty or copies an array to itself. Returns 0, or -1 with an exception. */
static int add_move(Moves* moves, const Move* move) {
  return move->bytes == 0 || move->source == move->target ? 0 : append(moves, move);
}

static void free_moves(Moves* moves) {
  if (moves->room > FEW_MOVES) PyMem_Free(moves->each);
}

/* A range of memory that a call reads or writes. */
typedef struct Used {
  uintptr_t begin, end;
  int received;
} Used;

static int compare_used(const void* a, const void* b) {
  const Used *first = a, *second = b;
  if (first->begin != second->begin) return first->begin < second->begin ? -1 : 1;
  return (first->end > second->end) - (first->end < second->end);
}

/* Returns 1 if no received array shares memory with another array, else 0; -1 with an exception. Sent arrays may
 * overlap. */
static int are_apart(const Moves* moves) {
  if (moves->count == 1 && (moves->each[0].source == 0 || moves->each[0].target == 0)) return 1;
  Used few[2 * FEW_MOVES];
  Used* used = 2 * moves->count <= 2 * FEW_MOVES ? few : PyMem_Malloc(2 * moves->count * sizeof *used);
  if (used == NULL) {
    PyErr_NoMemory();
    return -1;
  }
  size_t count = 0;
  for (size_t i = 0; i < moves->count; ++i) {
    const Move* move = &moves->each[i];
    if (move->source != 0) used[count++] = (Used){move->source, move->source + move->bytes, 0};
    if (move->target != 0) used[count++] = (Used){move->target, move->target + move->bytes, 1};
  }
  qsort(used, count, sizeof *used, compare_used);
  uintptr_t sent_to = 0, received_to = 0; /* the greatest end addresses of sent and received ranges so far */
  int apart = 1;
  for (size_t i = 0; i < count && apart; ++i) {
    apart = used[i].begin >= received_to && (!used[i].received || used[i].begin >= sent_to);
    uintptr_t* end = used[i].received ? &received_to : &sent_to;
    if (used[i].end > *end) *end = used[i].end;
  }
  if (used != few) PyMem_Free(used);
  return apart;
}

static int compare_moves(const void* a, const void* b) {
  const uint64_t first = ((const Move*)a)->key, second = ((const Move*)b)->key;
  return (first > second) - (first < second);
}

/* Sorts moves into the order of launches, with the lock held: first the first move of each flow, then the second move
 * of each flow, and so on; within each of these, by the distance between the ranks. This order makes the launches of a
 * collective match between ranks. */
static void order_moves(FlowCalls* self, Moves* moves) {
  const uint32_t rank = self->flows->rank, ranks = self->flows->world_size;
  int in_order = 1;
  for (size_t i = 0; i < moves->count; ++i) self->turns[flow_of(&moves->each[i])] = 0;
  for (size_t i = 0; i < moves->count; ++i) {
    Move* move = &moves->each[i];
    const uint64_t turn = self->turns[flow_of(move)]++;
    const uint32_t distance = (move->source != 0 ? move->peer + ranks - rank : rank + ranks - move->peer) % ranks;
    move->key = turn << 32 | (uint64_t)distance << 1 | (move->target != 0);
    if (i > 0 && move->key < moves->each[i - 1].key) in_order = 0;
  }
  if (!in_order) qsort(moves->each, moves->count, sizeof *moves->each, compare_moves);
}

/* -- issuing, with the lock held --- */

/* Fills in a launch with the next moves. Returns the number of moves in the launch. */
static size_t fill(const FlowCalls* self, const Move* moves, size_t count) {
  ProxycclFlows* flows = self->flows;
  size_t filled = 0;
  unsigned blocks = 0;
  for (; filled < count && filled < PROXYCCL_MAX_TRANSFERS && moves[filled].key >> 32 == moves[0].key >> 32; ++filled) {
    const Move* move = &moves[filled];
    const uint64_t each = move->bytes <= flows->lanes * flows->line_bytes ? self->bytes_at_once : self->bytes_per_lane;
    const uint64_t wanted = (move->bytes + each - 1) / each;
    const uint32_t lanes =
        wanted < flows->lanes ? (uint32_t)wanted : flows->lanes; /* the same on the sender and the receiver */
    flows->transfers[filled] = (ProxycclTransfer){
        .src = (const char*)move->source,
        .dst = (char*)move->target,
        .bytes = move->bytes,
        .lane_bytes = ((move->bytes + lanes - 1) / lanes + 127) / 128 * 128,
        .peer = move->peer,
        .lanes = lanes,
    };
    blocks += lanes;
  }
  flows->count = (uint32_t)filled;
  self->launch->grid[0] = blocks;
  return filled;
}

/* For each move, makes a stream wait for the latest launch of the move's flow if that launch was on another stream.
 * Returns the driver's status.
 *
 * A stream can't wait for an event of another capture, or of no capture, so the program must order the launches of its
 * graphs itself. */
static int follow_earlier(const FlowCalls* self, const Moves* moves, uintptr_t stream, uint64_t capture) {
  uint32_t waited = 0;
  for (size_t i = 0; i < moves->count; ++i) {
    if (moves->each[i].peer == self->flows->rank) continue;
    const LastOfFlow* last = last_of(self, &moves->each[i], capture);
    if (last->event == 0 || last->event == waited || last->capture != capture || last->stream == stream) continue;
    const int status = self->streams->wait((void*)stream, (void*)self->events[last->event - 1].handle, 0);
    if (status != 0) return status;
    waited = last->event;
  }
  return 0;
}

static void note_launch(FlowCalls* self, const Moves* moves, uint32_t event, uintptr_t stream, uint64_t capture) {
  for (size_t i = 0; i < moves->count; ++i) {
    if (moves->each[i].peer == self->flows->rank) continue;
    LastOfFlow* last = last_of(self, &moves->each[i], capture);
    self->events[event - 1].flows += 1;
    if (last->event != 0) self->events[last->event - 1].flows -= 1;
    *last = (LastOfFlow){.event = event, .stream = stream, .capture = capture};
  }
}

/* Issues the moves of a group of one rank. Returns the driver's status. */
static int copy_all(const FlowCalls* self, const Moves* moves, uintptr_t stream) {
  int status = 0;
  for (size_t i = 0; i < moves->count && status == 0; ++i) {
    const Move* move = &moves->each[i];
    status = self->copy((void*)move->target, (const void*)move->source, move->bytes, (void*)stream);
  }
  return status;
}

/* Issues ordered moves. In a group of several ranks, records an event after them. `named`: whether the program passed
 * the stream's handle as a number, and so keeps the stream open. Returns the driver's status; PROXYCCL_OTHER_CONTEXT,
 * with nothing done; or PROXYCCL_CALL_ABORTED after a failure. */
static int issue(FlowCalls* self, const Moves* moves, uint32_t event, uintptr_t stream, int named) {
  if (!proxyccl_order_is_current(self->streams)) return PROXYCCL_OTHER_CONTEXT;
  const uint64_t capture = proxyccl_stream_capture(self->streams, stream);
  int status = follow_earlier(self, moves, stream, capture);
  if (status != 0) return status;
  /* The failure is checked immediately before the launch, because a kernel that begins after a failure must not use
   * memory that a peer may have freed. */
  if (failure_is_told(self->control)) return PROXYCCL_CALL_ABORTED;
  if (self->launch == NULL) return copy_all(self, moves, stream);
  for (size_t done = 0; done < moves->count && status == 0;) {
    done += fill(self, moves->each + done, moves->count - done);
    status = proxyccl_launch_current(self->launch, stream); /* the driver copies the argument */
  }
  if (status == 0) status = self->streams->record((void*)self->events[event - 1].handle, (void*)stream);
  if (status != 0) return status;
  note_launch(self, moves, event, named && stream != self->thread_stream ? stream : NO_STREAM, capture);
  return 0;
}

/* Returns the number of an event that no flow needs; 0 with an exception. */
static uint32_t take_event(FlowCalls* self) {
  for (uint32_t i = 0; i < self->event_count; ++i)
    if (self->events[i].flows == 0) return i + 1;
  const uintptr_t handle = proxyccl_take_address(PyObject_CallNoArgs(self->make_event));
  if (PyErr_Occurred() != NULL) return 0;
  self->events[self->event_count] = (Event){.handle = handle};
  return ++self->event_count;
}

/* Returns 1 if the group is open; else 0, possibly with an exception. */
static int is_open(const FlowCalls* self) {
  PyObject* state = PyObject_GetAttr(self->failure, state_name);
  const int open = state != NULL && (state == open_name || PyUnicode_Compare(state, open_name) == 0);
  Py_XDECREF(state);
  return open;
}

static int issue_without_gil(FlowCalls* self, const Moves* moves, uint32_t event, uintptr_t stream, int named) {
  int status;
  Py_BEGIN_ALLOW_THREADS;
  status = issue(self, moves, event, stream, named);
  Py_END_ALLOW_THREADS;
  return status;
}

/* Returns 0, or -1 with an exception. */
static int issue_here(FlowCalls* self, Moves* moves, uintptr_t stream, int named) {
  /* `issue` checks the abort word once more. */
  if (!is_open(self) && proxyccl_take_result(PyObject_CallMethod(self->failure, "require_usable", NULL)) != 0)
    return -1;
  const uint32_t event = PyErr_Occurred() != NULL ? 0 : take_event(self);
  if (event == 0) return -1;
  order_moves(self, moves);
  int status = issue_without_gil(self, moves, event, stream, named);
  if (status == PROXYCCL_OTHER_CONTEXT) {
    PyObject* context = proxyccl_enter_context(self->context);
    if (context == NULL) return -1;
    status = issue_without_gil(self, moves, event, stream, named);
    if (proxyccl_leave_context(context) != 0) return -1;
  }
  if (status == 0) return 0;
  Py_XDECREF(PyObject_CallFunction(self->refuse, "i", status)); /* always raises */
  return -1;
}

static int issue_locked(FlowCalls* self, Moves* moves, uintptr_t stream, int named) {
  if (proxyccl_take_result(PyObject_CallNoArgs(self->acquire)) != 0) return -1;
  const int issued = issue_here(self, moves, stream, named);
  return proxyccl_leave_lock(self->release, issued);
}

/* Issues moves on a separate stream, and waits until they are complete. Returns 0, or -1 with an exception. */
static int issue_and_wait(FlowCalls* self, Moves* moves) {
  PyObject* stream = PyObject_CallNoArgs(self->take_stream);
  const uintptr_t own = stream == NULL ? 0 : proxyccl_take_address(PyObject_GetAttrString(stream, "handle"));
  int issued = PyErr_Occurred() != NULL ? -1 : issue_locked(self, moves, own, 0);
  if (issued == 0) issued = proxyccl_take_result(PyObject_CallFunctionObjArgs(self->await, stream, NULL));
  Py_XDECREF(stream);
  return issued;
}

/* Stores a stream's handle. `own`: whether the library chose the stream; if not, an invalid stream is refused. Returns
 * 0, or -1 with an exception. */
static int find_handle(const FlowCalls* self, PyObject* stream, int own, uintptr_t* handle) {
  PyObject* found = (own && PyLong_Check(stream)) || Py_TYPE(stream) == self->current_stream
                        ? Py_NewRef(stream)
                        : PyObject_CallFunctionObjArgs(self->handle_of, stream, NULL);
  *handle = proxyccl_take_address(found);
  return PyErr_Occurred() != NULL ? -1 : 0;
}

/* Issues a call's moves. `owners`: objects to keep until the stream has completed the moves; NULL if the caller keeps
 * them. `agree`: compares the call with the other ranks' calls; NULL for no comparison. Returns 0, or -1 with an
 * exception. */
static int issue_call(FlowCalls* self, Moves* moves, PyObject* stream, PyObject* owners, PyObject* agree) {
  const int waits = stream == Py_None && self->types.device < 0;
  uintptr_t handle = 0;
  if (!waits && find_handle(self, stream, owners == NULL, &handle) != 0) return -1;
  if (agree != NULL && proxyccl_take_result(PyObject_CallFunctionObjArgs(agree, owners, NULL)) != 0) return -1;
  if (moves->count == 0) return 0;
  if (waits) return issue_and_wait(self, moves);
  /* The handle of a stream object may be reused after the object is closed; a stream that is passed as a number stays
   * open. */
  if (issue_locked(self, moves, handle, PyLong_Check(stream)) != 0) return -1;
  if (owners == NULL || Py_TYPE(stream) == self->current_stream) return 0;
  return proxyccl_take_result(PyObject_CallFunction(self->keep, "OOK", owners, stream, (unsigned long long)handle));
}

/* -- the arrays of a call --- */

/* One side of a call: the arrays that this rank sends, or the arrays that this rank receives. */
typedef struct Side {
  PyObject* arrays; /* one array, or a list or tuple of arrays */
  PyObject* ranks;  /* see FlowCalls.call in _calls.pyi */
  int receives;
  GivenArray array; /* set for a single array, of which only the reference to the element type is held */
  int is_split;     /* 1: the array's rows are split among all ranks */
} Side;

static int is_sequence(PyObject* object) { return PyTuple_Check(object) || PyList_Check(object); }

static Py_ssize_t size_of(PyObject* sequence) {
  return PyTuple_Check(sequence) ? PyTuple_Size(sequence) : PyList_Size(sequence);
}

/* Returns a new reference; NULL with an exception. */
static PyObject* item_of(PyObject* sequence, Py_ssize_t i) {
  PyObject* item = PyTuple_Check(sequence) ? PyTuple_GetItem(sequence, i) : PyList_GetItem(sequence, i);
  return Py_XNewRef(item);
}

static int is_text(PyObject* object, const char* text) {
  return PyUnicode_Check(object) && PyUnicode_CompareWithASCIIString(object, text) == 0;
}

/* Returns whether a buffer's element type is one that every call takes, in this machine's byte order. */
static int has_known_format(const ArrayKind* kind) {
  const char* format = kind->format;
  if (format[0] == 'Z') return (format[1] == 'f' || format[1] == 'd') && format[2] == 0;
  return format[0] != 0 && format[1] == 0 && strchr("?bBhHiIlLqQefd", format[0]) != NULL;
}

/* Reads and checks an array. Returns 1, with a reference to the element type; 0 if Python must read or refuse the
 * array; or -1 with an exception that the program raised. */
static int read_array(const FlowCalls* self, PyObject* x, int receives, GivenArray* array) {
  const int read = proxyccl_read_array(&self->types, x, array);
  if (read <= 0) return read;
  const PyTypeObject* type = array->kind.type;
  int usable = !(receives && array->kind.readonly);
  if (type == self->types.array)
    usable = usable && array->kind.runtime == self->runtime;
  else if (array->buffer.obj != NULL)
    usable = usable && type == self->ndarray && self->types.device < 0 && has_known_format(&array->kind) &&
             array->at % (uintptr_t)array->buffer.itemsize == 0;
  Py_CLEAR(array->kind.runtime);
  PyBuffer_Release(&array->buffer);
  if (!usable) Py_CLEAR(array->kind.element);
  return usable;
}

/* Returns a number from 0 to `end` - 1; -1 for any other object, possibly with an exception. */
static Py_ssize_t count_in(PyObject* number, Py_ssize_t end) {
  if (number == NULL || !PyLong_CheckExact(number)) return -1;
  const Py_ssize_t count = PyLong_AsSsize_t(number);
  return 0 <= count && count < end ? count : -1;
}

/* The moves of a call while they are read. */
typedef struct Reading {
  Moves moves;
  Moves own;       /* copies within this rank, in halves: first all sending halves, then all receiving halves */
  size_t sent_own; /* the number of sending halves in `own` */
} Reading;

/* Adds the move of an array's bytes to or from a rank. Returns 1, or -1 with an exception. */
static int add_part(const FlowCalls* self, const Side* side, size_t rank, uintptr_t at, uint64_t bytes,
                    Reading* reading) {
  const Move part = {
      .source = side->receives ? 0 : at, .target = side->receives ? at : 0, .bytes = bytes, .peer = (uint32_t)rank};
  if (rank != self->flows->rank) return add_move(&reading->moves, &part) == 0 ? 1 : -1;
  reading->sent_own += !side->receives;
  return append(&reading->own, &part) == 0 ? 1 : -1;
}

/* Joins the halves of copies within this rank. Returns 1; 0 if the halves do not match; -1 with an exception. */
static int pair_own(Reading* reading) {
  const size_t count = reading->sent_own;
  if (reading->own.count != 2 * count) return 0;
  for (size_t i = 0; i < count; ++i) {
    Move move = reading->own.each[i];
    const Move* received = &reading->own.each[count + i];
    if (move.bytes != received->bytes) return 0;
    move.target = received->target;
    if (add_move(&reading->moves, &move) != 0) return -1;
  }
  return 1;
}

/* Adds a move for each rank's rows of an array. The list `ranks` gives each rank's number of rows; without this list
 * all ranks have equally many rows. Returns the same values as `add_side`. */
static int add_rows(const FlowCalls* self, const Side* side, Reading* reading) {
  const size_t ranks = self->flows->world_size;
  const GivenArray* array = &side->array;
  if (array->kind.dimensions == 0) return 0;
  const Py_ssize_t rows = array->kind.shape[0];
  const uint64_t row_bytes = rows == 0 ? 0 : array->bytes / (uint64_t)rows;
  const int even = !is_sequence(side->ranks);
  if (even ? rows % (Py_ssize_t)ranks != 0 : size_of(side->ranks) != (Py_ssize_t)ranks) return 0;
  Py_ssize_t taken = 0;
  for (size_t rank = 0; rank < ranks; ++rank) {
    Py_ssize_t count = rows / (Py_ssize_t)ranks;
    if (!even) {
      PyObject* number = item_of(side->ranks, (Py_ssize_t)rank);
      count = count_in(number, rows - taken + 1);
      Py_XDECREF(number);
      if (count < 0) return proxyccl_clear_exception();
    }
    if (add_part(self, side, rank, array->at + (uint64_t)taken * row_bytes, (uint64_t)count * row_bytes, reading) < 0)
      return -1;
    taken += count;
  }
  return taken == rows;
}

static int add_list(const FlowCalls* self, Side* side, Reading* reading) {
  const Py_ssize_t count = size_of(side->arrays);
  if (!is_sequence(side->ranks) || size_of(side->ranks) != count) return 0;
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* number = item_of(side->ranks, i);
    const Py_ssize_t rank = count_in(number, (Py_ssize_t)self->flows->world_size);
    Py_XDECREF(number);
    PyObject* x = rank < 0 ? NULL : item_of(side->arrays, i);
    if (x == NULL) return proxyccl_clear_exception();
    GivenArray array;
    const int read = read_array(self, x, side->receives, &array);
    Py_DECREF(x);
    if (read <= 0) return read;
    if (i == 0) {
      side->array = array;
    } else {
      if (array.kind.element != side->array.kind.element ||
          memcmp(array.kind.format, side->array.kind.format, PROXYCCL_LONGEST_FORMAT) != 0)
        side->array.kind.type = NULL; /* NULL marks a list whose arrays differ in element type */
      Py_XDECREF(array.kind.element);
    }
    if (add_part(self, side, (size_t)rank, array.at, array.bytes, reading) < 0) return -1;
  }
  return 1;
}

/* Adds the moves of the arrays that are sent, or of the arrays that are received. Returns 1; 0 if Python must handle
 * the arguments; -1 with an exception. */
static int add_side(const FlowCalls* self, Side* side, Reading* reading) {
  if (is_sequence(side->arrays)) return add_list(self, side, reading);
  const int read = read_array(self, side->arrays, side->receives, &side->array);
  if (read <= 0) return read;
  if (is_text(side->ranks, "all")) {
    int added = !side->receives;
    for (size_t rank = 0; added > 0 && rank < self->flows->world_size; ++rank)
      added = add_part(self, side, rank, side->array.at, side->array.bytes, reading);
    return added;
  }
  side->is_split = is_sequence(side->ranks) || is_text(side->ranks, "even");
  if (side->is_split) return add_rows(self, side, reading);
  const Py_ssize_t peer = count_in(side->ranks, (Py_ssize_t)self->flows->world_size);
  if (peer < 0) return proxyccl_clear_exception();
  return add_part(self, side, (size_t)peer, side->array.at, side->array.bytes, reading);
}

static int overlap(const GivenArray* a, const GivenArray* b) {
  return a->bytes != 0 && b->bytes != 0 && a->at < b->at + b->bytes && b->at < a->at + a->bytes;
}

static int is_empty_list(PyObject* arrays) { return is_sequence(arrays) && size_of(arrays) == 0; }

/* Returns whether the sent and the received arrays match. If rows are split, sent and received rows must have the same
 * shape and type; an array that is sent to all ranks must be received in arrays of the same type. */
static int sides_fit(const Side* x, const Side* out) {
  const ArrayKind *sent = &x->array.kind, *received = &out->array.kind;
  if (sent->type == NULL || received->type == NULL) /* a list of arrays of different types */
    return !is_text(x->ranks, "all");
  if (!x->is_split && !out->is_split && !is_text(x->ranks, "all")) return 1;
  if (is_sequence(x->arrays)) return 1;
  if (sent->element != received->element || memcmp(sent->format, received->format, PROXYCCL_LONGEST_FORMAT) != 0)
    return 0;
  if (is_sequence(out->arrays)) return 1;
  if (sent->dimensions == 0) return !x->is_split && received->dimensions == 1; /* each rank gives one row */
  if (sent->dimensions != received->dimensions) return 0;
  for (Py_ssize_t i = 1; i < sent->dimensions; ++i)
    if (sent->shape[i] != received->shape[i]) return 0;
  return !(x->is_split && out->is_split &&
           overlap(&x->array, &out->array)); /* Python handles in-place calls that split rows */
}

/* Reads a call's moves. Returns 1; 0 if Python must handle the arguments; -1 with an exception. */
static int read_moves(const FlowCalls* self, Side* x, Side* out, Reading* reading) {
  int read = add_side(self, x, reading);
  if (read > 0) read = add_side(self, out, reading);
  if (read > 0 && !is_empty_list(x->arrays) && !is_empty_list(out->arrays)) read = sides_fit(x, out);
  if (read > 0) read = pair_own(reading);
  return read <= 0 ? read : are_apart(&reading->moves);
}

/* Makes a call. Returns 1; 0 if Python must handle the arguments; -1 with an exception. */
static int make_call(FlowCalls* self, PyObject* const* given, int keeps) {
  if (!is_open(self)) return proxyccl_clear_exception();
  PyObject* const options = given[2];
  if (!PyTuple_Check(options) || PyTuple_Size(options) != 3) {
    PyErr_SetString(PyExc_TypeError, "options: expected a tuple of 3");
    return -1;
  }
  Side x = {.arrays = given[0], .ranks = PyTuple_GetItem(options, 1)};
  Side out = {.arrays = given[1], .ranks = PyTuple_GetItem(options, 2), .receives = 1};
  Reading reading;
  reading.moves.count = reading.moves.room = reading.own.count = reading.own.room = reading.sent_own = 0;
  int made = read_moves(self, &x, &out, &reading);
  Py_CLEAR(x.array.kind.element);
  Py_CLEAR(out.array.kind.element);
  if (made > 0) {
    PyObject* const first = PyTuple_GetItem(options, 0);
    PyObject* const agree = PyCallable_Check(first) ? first : NULL;
    PyObject* owners = keeps ? PyTuple_Pack(2, given[0], given[1]) : NULL;
    if ((keeps && owners == NULL) || issue_call(self, &reading.moves, given[3], owners, agree) != 0) made = -1;
    Py_XDECREF(owners);
  }
  free_moves(&reading.moves);
  free_moves(&reading.own);
  return made;
}

static PyObject* call(PyObject* object, PyObject* const* arguments, Py_ssize_t count) {
  if (!proxyccl_has_arguments(count, 4, "call(x, out, options, stream)")) return NULL;
  const int made = make_call((FlowCalls*)object, arguments, 1);
  return made < 0 ? NULL : PyBool_FromLong(made);
}

static PyObject* call_borrowed(PyObject* object, PyObject* const* arguments, Py_ssize_t count) {
  if (!proxyccl_has_arguments(count, 4, "call_borrowed(x, out, options, stream)")) return NULL;
  const int made = make_call((FlowCalls*)object, arguments, 0);
  return made < 0 ? NULL : PyBool_FromLong(made);
}

static PyObject* takes(PyObject* object, PyObject* const* arguments, Py_ssize_t count) {
  if (!proxyccl_has_arguments(count, 2, "takes(x, received)")) return NULL;
  GivenArray array;
  const int read = read_array((const FlowCalls*)object, arguments[0], arguments[1] == Py_True, &array);
  if (read > 0) Py_XDECREF(array.kind.element);
  return read < 0 ? NULL : PyBool_FromLong(read);
}

/* -- the object --- */

/* flow_clear is not the type's tp_clear: every reference cycle through this object also has an object that can be
 * cleared. */
#define REFERENCES(apply) apply(arguments) apply(acquire) apply(release)
PROXYCCL_COLLECT(flow, FlowCalls, REFERENCES)

static int free_all(PyObject* object) {
  FlowCalls* self = (FlowCalls*)object;
  PyMem_Free(self->last);
  PyMem_Free(self->turns);
  PyMem_Free(self->events);
  return flow_clear(object);
}

static void end(PyObject* object) { proxyccl_free(object, free_all); }

static PyObject* make(PyTypeObject* type, PyObject* arguments, PyObject* Py_UNUSED(keywords)) {
  PyObject *object = PyType_GenericNew(type, NULL, NULL), *lock, *launchable;
  FlowCalls* self = (FlowCalls*)object;
  if (object == NULL) return NULL;
  self->arguments = Py_NewRef(arguments);
  if (!PyArg_ParseTuple(
          arguments, "O&O!O!OOO(O&O&OO&O&)(O&O&O&O&)(OOOOOOO)", proxyccl_as_array_types, &self->types, &PyType_Type,
          &self->ndarray, &PyType_Type, &self->current_stream, &self->runtime, &self->failure, &lock,
          PROXYCCL_AT(launch), PROXYCCL_AT(flows), &launchable, PROXYCCL_AT(bytes_per_lane), PROXYCCL_AT(bytes_at_once),
          PROXYCCL_AT(copy), PROXYCCL_AT(streams), PROXYCCL_AT(control), PROXYCCL_AT(thread_stream), &self->refuse,
          &self->handle_of, &self->context, &self->keep, &self->make_event, &self->take_stream, &self->await)) {
    Py_DECREF(object);
    return NULL;
  }
  const size_t count = 2 * (size_t)self->flows->world_size;
  self->last = PyMem_Calloc(LASTS * count, sizeof *self->last);
  self->turns = PyMem_Calloc(count, sizeof *self->turns);
  self->events = PyMem_Calloc(LASTS * count + 1, sizeof *self->events);
  self->acquire = PyObject_GetAttrString(lock, "acquire");
  self->release = self->acquire == NULL ? NULL : PyObject_GetAttrString(lock, "release");
  if (self->release != NULL && self->last != NULL && self->turns != NULL && self->events != NULL) return object;
  if (PyErr_Occurred() == NULL) PyErr_NoMemory();
  Py_DECREF(object);
  return NULL;
}

static PyMethodDef methods[] = {
    {"call", (PyCFunction)(void (*)(void))call, METH_FASTCALL, NULL},
    {"call_borrowed", (PyCFunction)(void (*)(void))call_borrowed, METH_FASTCALL, NULL},
    {"takes", (PyCFunction)(void (*)(void))takes, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};
static PyObject* events_of(PyObject* object, void* Py_UNUSED(closure)) {
  const FlowCalls* self = (const FlowCalls*)object;
  PyObject* list = PyList_New(0);
  for (uint32_t i = 0; list != NULL && i < self->event_count; ++i) {
    PyObject* handle = PyLong_FromUnsignedLongLong(self->events[i].handle);
    if (handle == NULL || PyList_Append(list, handle) != 0) Py_CLEAR(list);
    Py_XDECREF(handle);
  }
  return list;
}
static PyGetSetDef attributes[] = {
    {"events", events_of, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
static PyType_Slot slots[] = {
    {Py_tp_new, make},        {Py_tp_dealloc, end},       {Py_tp_traverse, flow_traverse},
    {Py_tp_methods, methods}, {Py_tp_getset, attributes}, {0, NULL},
};

int proxyccl_add_flow_calls(PyObject* module) {
  if (state_name == NULL) state_name = PyUnicode_InternFromString("state");
  if (open_name == NULL) open_name = PyUnicode_InternFromString("open");
  if (state_name == NULL || open_name == NULL) return -1;
  static PyTypeObject* type;
  return proxyccl_add_type(module, &type, NULL, "proxyccl.channels.calls._calls.FlowCalls", sizeof(FlowCalls),
                           Py_TPFLAGS_HAVE_GC, slots);
}
