/* The types of dispatch_form.c and combine_form.c. */
#ifndef PROXYCCL_FORMS_H
#define PROXYCCL_FORMS_H

#include "../calls/form_list.h"

/* Each adds its types to the module. 0, or -1 with an exception. */
int proxyccl_add_dispatch_form(PyObject* module);
int proxyccl_add_combine_form(PyObject* module);

#endif
