/* The part of EPAllToAllLayoutDesc (layout.py) that forms read and write. */
#ifndef PROXYCCL_DESCRIPTOR_H
#define PROXYCCL_DESCRIPTOR_H

#include "../calls/calls.h"
#include "expert_calls.h"

enum { PROXYCCL_DESCRIPTOR_BLOCKS = 2 };

/* Tables that lie in one array. */
typedef struct TableBlock {
  PyObject *array, *tables;
  uintptr_t at;
  const uint64_t* offsets; /* for proxyccl_expert_place; of the tables */
} TableBlock;

typedef struct Descriptor {
  PyObject ob_base;
  PyObject *owner, *like, *stream, *missing; /* `missing` is None when its rows were received */
  Py_ssize_t number, tokens, rows, output_buffer;
  char counts_rows;
  int count; /* of blocks */
  TableBlock blocks[PROXYCCL_DESCRIPTOR_BLOCKS];
} Descriptor;

/* Adds the type to the module. 0, or -1 with an exception. */
int proxyccl_add_descriptor(PyObject* module);
/* The object as a descriptor of this owner whose rows were received; NULL without an exception. */
Descriptor* proxyccl_received(PyObject* object, PyObject* owner);
/* Adds tables in an array. 0, or -1 with an exception. */
int proxyccl_add_block(Descriptor* self, PyObject* array, uintptr_t at, PyObject* tables, const uint64_t* offsets);
/* Stores the places of its tables; those that it lacks stay as they are. */
static inline void proxyccl_place_tables(const Descriptor* self, ProxycclExpertLayout* layout) {
  for (int i = 0; i < self->count; ++i) proxyccl_expert_place(layout, self->blocks[i].at, self->blocks[i].offsets);
}

#endif
