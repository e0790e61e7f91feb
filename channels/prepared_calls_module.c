/* The module `_prepared_calls`: PreparedCalls, and the forms of experts' calls, which issue theirs by it. */
#include "expert_parallel/forms.h"
#include "prepared_calls.h"

static int add_types(PyObject* module) {
  if (proxyccl_add_prepared_calls(module) != 0 || proxyccl_add_dispatch_form(module) != 0) return -1;
  return proxyccl_add_combine_form(module);
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, add_types}, {0, NULL}};
static PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_prepared_calls",
    .m_size = 0,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__prepared_calls(void) { return PyModuleDef_Init(&definition); }
