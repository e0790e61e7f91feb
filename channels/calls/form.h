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
  uintptr_t* word;
  size_t array;
  size_t offset;
} Relocation;

typedef struct AddressRange {
  uintptr_t start, end;
} AddressRange;

/* See Form in _calls.pyi. */
typedef struct CallForm {
  PyObject ob_base;
  PreparedCall prepared; /* `launch` is NULL if nothing is to be launched */
  Relocation* relocations;
  size_t relocation_count;
  uintptr_t* peers_words; /* by rank, the words that hold the output's address in that rank's address space; or NULL */
  size_t ranks, rank;
  AddressRange* ranges; /* the form is dropped when the memory in these ranges changes */
  size_t range_count;
  Py_ssize_t lent;  /* index of the array that peers should reach if the program uses it often; -1 for none */
  int names_memory; /* 1: the launch names memory by proxies' ids, so the form fits only the same addresses */
} CallForm;

/* Fills in the addresses of a call's arrays, with the lock of its group held. `output` is the range in which kernels of
 * all ranks reach the last array, or NULL. */
void proxyccl_fill_form(const CallForm* form, const GivenArray* arrays, size_t count, const ReachedRange* output);
int proxyccl_is_form(PyObject* object);
/* Adds the type Form to the module. Returns 0, or -1 with an exception. */
int proxyccl_add_form(PyObject* module);

/* Calls a Python function without arguments that releases a lock. If an exception is set before, it stays set. Returns
 * `result`, or -1 with an exception. */
int proxyccl_leave_lock(PyObject* release, int result);
/* Enters the context that a function returns. Returns the context for `proxyccl_leave_context`, or NULL with an
 * exception. */
PyObject* proxyccl_enter_context(PyObject* make);
/* Returns 0, or -1 with an exception. */
int proxyccl_leave_context(PyObject* context);

#endif
