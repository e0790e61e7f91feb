/* A growable byte buffer. */
#pragma once

#include <stdlib.h>
#include <string.h>

typedef struct Buffer {
  char *bytes;
  size_t used, room;
} Buffer;

/* Extends the buffer by `more` bytes. Returns the address of the new bytes, or NULL if out of memory. */
static inline char *buffer_extend(Buffer *buffer, size_t more) {
  if (buffer->room - buffer->used < more) {
    const size_t room = (buffer->used + more) * 2;
    char *bytes = realloc(buffer->bytes, room);
    if (bytes == NULL) return NULL;
    buffer->bytes = bytes;
    buffer->room = room;
  }
  buffer->used += more;
  return buffer->bytes + buffer->used - more;
}

static inline int buffer_append(Buffer *buffer, const void *bytes, size_t count) {
  if (count == 0) return 1;
  char *to = buffer_extend(buffer, count);
  if (to != NULL) memcpy(to, bytes, count);
  return to != NULL;
}

static inline void buffer_free(Buffer *buffer) {
  free(buffer->bytes);
  *buffer = (Buffer){0};
}
