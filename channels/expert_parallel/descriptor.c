#include "descriptor.h"

static PyTypeObject* descriptor_type; /* the type is made once per process */

Descriptor* proxyccl_received(PyObject* object, PyObject* owner) {
  if (!PyObject_TypeCheck(object, descriptor_type)) return NULL;
  Descriptor* self = (Descriptor*)object;
  return self->owner == owner && self->missing == Py_None ? self : NULL;
}

int proxyccl_add_block(Descriptor* self, PyObject* array, uintptr_t at, PyObject* tables, const uint64_t* offsets) {
  if (self->count == PROXYCCL_DESCRIPTOR_BLOCKS) {
    PyErr_SetString(PyExc_ValueError, "a descriptor has too many blocks of tables");
    return -1;
  }
  self->blocks[self->count++] = (TableBlock){Py_NewRef(array), Py_NewRef(tables), at, offsets};
  return 0;
}

static PyObject* add_block(PyObject* object, PyObject* arguments) {
  PyObject *array, *tables;
  unsigned long long at, offsets;
  if (!PyArg_ParseTuple(arguments, "OKOK", &array, &at, &tables, &offsets)) return NULL;
  if (proxyccl_add_block((Descriptor*)object, array, (uintptr_t)at, tables, (const uint64_t*)(uintptr_t)offsets) != 0)
    return NULL;
  Py_RETURN_NONE;
}

/* Returns the array that holds a table, the array's address, the table's entry in `Tables.places`, and the `Tables`;
 * None if the descriptor lacks the table. */
static PyObject* find(PyObject* object, PyObject* name) {
  static PyObject* attribute;
  if (attribute == NULL && (attribute = PyUnicode_InternFromString("places")) == NULL) return NULL;
  const Descriptor* self = (const Descriptor*)object;
  for (int i = 0; i < self->count; ++i) {
    const TableBlock* block = &self->blocks[i];
    PyObject* places = PyObject_GetAttr(block->tables, attribute);
    PyObject* place = places == NULL ? NULL : PyDict_GetItemWithError(places, name);
    PyObject* found = NULL;
    if (place != NULL) found = Py_BuildValue("OKOO", block->array, (unsigned long long)block->at, place, block->tables);
    Py_XDECREF(places);
    if (found != NULL || PyErr_Occurred() != NULL) return found;
  }
  Py_RETURN_NONE;
}

static int traverse(PyObject* object, visitproc visit, void* arg) {
  Descriptor* self = (Descriptor*)object;
  Py_VISIT(Py_TYPE(object));
  Py_VISIT(self->owner);
  Py_VISIT(self->like);
  Py_VISIT(self->stream);
  for (int i = 0; i < self->count; ++i) {
    Py_VISIT(self->blocks[i].array);
    Py_VISIT(self->blocks[i].tables);
  }
  return 0;
}

static int let_go(PyObject* object) {
  Descriptor* self = (Descriptor*)object;
  const int count = self->count;
  self->count = 0;
  for (int i = 0; i < count; ++i) {
    Py_CLEAR(self->blocks[i].array);
    Py_CLEAR(self->blocks[i].tables);
  }
  Py_CLEAR(self->owner);
  Py_CLEAR(self->like);
  Py_CLEAR(self->stream);
  Py_CLEAR(self->missing);
  return 0;
}

static void end(PyObject* object) { proxyccl_free(object, let_go); }

static PyMethodDef methods[] = {
    {"add_block", add_block, METH_VARARGS, NULL},
    {"find", find, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};
static PyMemberDef members[] = {
    {"owner", T_OBJECT, offsetof(Descriptor, owner), 0, NULL},
    {"like", T_OBJECT, offsetof(Descriptor, like), 0, NULL},
    {"stream", T_OBJECT, offsetof(Descriptor, stream), 0, NULL},
    {"missing", T_OBJECT, offsetof(Descriptor, missing), 0, NULL},
    {"number", T_PYSSIZET, offsetof(Descriptor, number), 0, NULL},
    {"num_dispatch_token_cur_rank", T_PYSSIZET, offsetof(Descriptor, tokens), 0, NULL},
    {"rows", T_PYSSIZET, offsetof(Descriptor, rows), 0, NULL},
    {"output_buffer", T_PYSSIZET, offsetof(Descriptor, output_buffer), 0, NULL},
    {"counts_rows", T_BOOL, offsetof(Descriptor, counts_rows), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};
static PyType_Slot slots[] = {
    {Py_tp_doc, "Descriptor()\n--\n\nThe part of EPAllToAllLayoutDesc that C reads and writes."},
    {Py_tp_new, PyType_GenericNew},
    {Py_tp_dealloc, end},
    {Py_tp_traverse, traverse},
    {Py_tp_clear, let_go},
    {Py_tp_methods, methods},
    {Py_tp_members, members},
    {0, NULL},
};

int proxyccl_add_descriptor(PyObject* module) {
  return proxyccl_add_type(module, &descriptor_type, NULL, "proxyccl.channels.calls._calls.Descriptor",
                           sizeof(Descriptor), Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE, slots);
}
