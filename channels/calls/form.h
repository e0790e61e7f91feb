/* A form: a prepared call without the addresses of its arrays, and the function that issues the call. */
#ifndef PROXYCCL_FORM_H
#define PROXYCCL_FORM_H

#include "arrays.h"
#include "reach.h"

/* The type of functions that issue a call, such as proxyccl_calls_issue and proxyccl_calls_ring (calls.h). */
typedef int (*Issue)(void* callers, void* call, void* launch, uintptr_t stream);

typedef struct PreparedCall {
  Issue issue;
  void *callers, *call, *launch; /* the arguments that are passed to the Issue function */
  PyObject* kept;                /* objects that must live as long as these arguments; see Form in _calls.pyi */
} PreparedCall;

/* A word of a launch's arguments that holds an address in an array of the call. */
typedef struct Relocation {
  uint64_t word; /* the word's address */
  uint64_t array, offset;
} Relocation;

typedef struct AddressRange {
  uint64_t start, end;
} AddressRange;

/* See Form in _calls.pyi. */
typedef struct CallForm {
  PyObject ob_base;
  PreparedCall prepared; /* `launch` is NULL if nothing is to be launched */
  Relocation* relocations;
  size_t relocation_count;
  uintptr_t* peers_words; /* for each rank, the word for the output's address in that rank's address space; or NULL */
  size_t ranks, rank;
  AddressRange* ranges; /* memory whose withdrawal drops the form */
  size_t range_count;
  Py_ssize_t lent;  /* index of the array to announce to peers if calls use it often; -1 for none */
  int names_memory; /* 1: the launch holds the proxies' ids of memory, so the form is valid only for the same addresses
                     */
} CallForm;

/* Fills in the addresses of a call's arrays. The caller holds the lock of the group's launches. `output`: the range
 * that holds the last array, if kernels of all ranks can access it; else NULL. */
void proxyccl_fill_form(const CallForm* form, const GivenArray* arrays, size_t count, const ReachedRange* output);
int proxyccl_is_form(PyObject* object);
/* Adds the type Form to the module. Returns 0, or -1 with an exception. */
int proxyccl_add_form(PyObject* module);

/* A converter for PyArg_ParseTuple: reads an address, which it stores as a pointer or as a number of 64 bits. For a
 * format O&, PROXYCCL_AT(member) is the converter and the member of `self`. */
int proxyccl_as_pointer(PyObject* number, void* pointer);
#define PROXYCCL_AT(member) proxyccl_as_pointer, &self->member
/* Releases what a Python function returned. Returns 0, or -1 with an exception if the function raised one. */
static inline int proxyccl_take_result(PyObject* result) {
  Py_XDECREF(result);
  return result == NULL ? -1 : 0;
}
/* Calls `release`, a Python function, and keeps an exception that is already set. Returns `result`, or -1 with an
 * exception. */
int proxyccl_leave_lock(PyObject* release, int result);
/* Calls a Python function, and enters the context manager that the function returns. Returns the manager for
 * `proxyccl_leave_context`, or NULL with an exception. */
PyObject* proxyccl_enter_context(PyObject* make);
/* Returns 0, or -1 with an exception. */
int proxyccl_leave_context(PyObject* context);

#endif
