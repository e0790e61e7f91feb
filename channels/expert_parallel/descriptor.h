/* The part of EPAllToAllLayoutDesc (layout.py) that forms read and write. */
#ifndef PROXYCCL_DESCRIPTOR_H
#define PROXYCCL_DESCRIPTOR_H

#include <string.h>

#include "../calls/calls.h"
#include "experts/experts.h"

enum { PROXYCCL_DESCRIPTOR_BLOCKS = 2, PROXYCCL_LAYOUT_TABLES = sizeof(ProxycclExpertLayout) / sizeof(int32_t*) };
#define PROXYCCL_NO_TABLE (~(uint64_t)0)

/* Tables that lie in one array. */
typedef struct TableBlock {
  PyObject *array, *tables;
  uintptr_t at;
  const uint64_t* offsets; /* in the order of the fields of ProxycclExpertLayout; PROXYCCL_NO_TABLE for other tables */
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
/* Stores the addresses of its tables, and NULL for those that it lacks. */
static inline void proxyccl_place_tables(const Descriptor* self, ProxycclExpertLayout* layout) {
  int32_t** tables = (int32_t**)layout;
  memset(layout, 0, sizeof *layout);
  for (int i = 0; i < self->count; ++i)
    for (int k = 0; k < PROXYCCL_LAYOUT_TABLES; ++k)
      if (self->blocks[i].offsets[k] != PROXYCCL_NO_TABLE)
        tables[k] = (int32_t*)(self->blocks[i].at + self->blocks[i].offsets[k]);
}

#endif
