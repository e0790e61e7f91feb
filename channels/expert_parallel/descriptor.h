/* The part of EPAllToAllLayoutDesc (layout.py) that prepared calls in C read and write. */
#ifndef PROXYCCL_DESCRIPTOR_H
#define PROXYCCL_DESCRIPTOR_H

#include <string.h>

#include "../calls/calls.h"
#include "experts/experts.h"

enum { PROXYCCL_DESCRIPTOR_BLOCKS = 2, PROXYCCL_LAYOUT_TABLES = sizeof(ProxycclExpertLayout) / sizeof(int32_t*) };
#define PROXYCCL_NO_TABLE (~(uint64_t)0)

/* The layout of tables that lie in one array. */
typedef struct TableBlock {
  PyObject *array, *tables;
  uintptr_t at;
  const uint64_t*
      offsets; /* in the order of ProxycclExpertLayout's fields; PROXYCCL_NO_TABLE for a table that the array lacks */
} TableBlock;

typedef struct Descriptor {
  PyObject ob_base;
  PyObject *owner, *like, *stream, *missing; /* `missing`: why rows are missing; None once they were received */
  Py_ssize_t number, tokens, rows, output_buffer;
  char counts_rows;
  int count; /* number of blocks */
  TableBlock blocks[PROXYCCL_DESCRIPTOR_BLOCKS];
} Descriptor;

/* Adds the type Descriptor to the module. Returns 0, or -1 with an exception set. */
int proxyccl_add_descriptor(PyObject* module);
/* Returns `object` if it is a descriptor that `owner` made and whose rows were received; otherwise NULL without an
 * exception. */
Descriptor* proxyccl_received(PyObject* object, PyObject* owner);
/* Adds an array with tables to a descriptor. Returns 0, or -1 with an exception set. */
int proxyccl_add_block(Descriptor* self, PyObject* array, uintptr_t at, PyObject* tables, const uint64_t* offsets);
/* Stores the addresses of the descriptor's tables in `layout`, and NULL for tables that the descriptor lacks. */
static inline void proxyccl_place_tables(const Descriptor* self, ProxycclExpertLayout* layout) {
  int32_t** tables = (int32_t**)layout;
  memset(layout, 0, sizeof *layout);
  for (int i = 0; i < self->count; ++i)
    for (int k = 0; k < PROXYCCL_LAYOUT_TABLES; ++k)
      if (self->blocks[i].offsets[k] != PROXYCCL_NO_TABLE)
        tables[k] = (int32_t*)(self->blocks[i].at + self->blocks[i].offsets[k]);
}

#endif
