/* Linked lists: elements are appended at the end and taken from the start. An element begins with a Node, and is in at
 * most one list. */
#pragma once

#include <stddef.h>

typedef struct Node {
  struct Node *next;
  int queued;
} Node;

typedef struct Queue {
  Node *first, **last; /* `last` is valid only if the list is not empty */
} Queue;

static inline void queue_push(Queue *queue, void *element) {
  Node *node = element;
  if (queue->first == NULL) queue->last = &queue->first;
  node->next = NULL;
  node->queued = 1;
  *queue->last = node;
  queue->last = &node->next;
}

/* Removes an element from the list. Does nothing if the element is in no list. */
static inline void queue_remove(Queue *queue, void *element) {
  Node *node = element, **at = &queue->first;
  if (!node->queued) return;
  while (*at != node) at = &(*at)->next;
  *at = node->next;
  if (queue->last == &node->next) queue->last = at;
  node->queued = 0;
}

/* Removes and returns the first element, or NULL if the list is empty. */
static inline void *queue_pop(Queue *queue) {
  Node *node = queue->first;
  if (node != NULL) queue_remove(queue, node);
  return node;
}
