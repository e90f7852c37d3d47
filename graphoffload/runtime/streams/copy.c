/* A copy between two events as one call from Python; see native.py. The CUDA runtime's functions are given by address. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

enum { TARGET, SOURCE, NBYTES, KIND, COMPUTE, SIDE, ISSUED, DONE, FIXED, MOST = FIXED + 8 };

static int (*event_record)(void *event, void *stream);
static int (*stream_wait)(void *stream, void *event, unsigned int flags);
static int (*memory_copy)(void *target, const void *source, size_t nbytes, int kind, void *stream);

static int numbers(PyObject *const *given, Py_ssize_t count, size_t *into)
{
    for (Py_ssize_t i = 0; i < count; i++) {
        into[i] = PyLong_AsSize_t(given[i]);
        if (into[i] == (size_t)-1 && PyErr_Occurred())
            return 0;
    }
    return 1;
}

PyDoc_STRVAR(use_doc, "use(record, wait, copy): addresses of cudaEventRecord, cudaStreamWaitEvent and cudaMemcpyAsync.");

static PyObject *use(PyObject *self, PyObject *const *given, Py_ssize_t count)
{
    size_t address[3];
    if (count != 3)
        return PyErr_Format(PyExc_TypeError, "3 addresses are needed, %zd were given", count);
    if (!numbers(given, count, address))
        return NULL;
    event_record = (int (*)(void *, void *))address[0];
    stream_wait = (int (*)(void *, void *, unsigned int))address[1];
    memory_copy = (int (*)(void *, const void *, size_t, int, void *))address[2];
    Py_RETURN_NONE;
}

PyDoc_STRVAR(copy_doc,
             "copy(target, source, nbytes, kind, compute, side, issued, done, *after) -> CUDA error code\n\n"
             "The side stream waits for what compute has issued (event `issued`) and for the events `after`, copies, and records\n"
             "`done`. The first error ends it. Releases the GIL.");

static PyObject *copy(PyObject *self, PyObject *const *given, Py_ssize_t count)
{
    size_t n[MOST];
    int code;
    if (memory_copy == NULL)
        return PyErr_Format(PyExc_RuntimeError, "use() has to be called first");
    if (count < FIXED || count > MOST)
        return PyErr_Format(PyExc_TypeError, "%d to %d arguments are needed, %zd were given", FIXED, MOST, count);
    if (!numbers(given, count, n))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    code = event_record((void *)n[ISSUED], (void *)n[COMPUTE]);
    if (code == 0)
        code = stream_wait((void *)n[SIDE], (void *)n[ISSUED], 0);
    for (Py_ssize_t i = FIXED; code == 0 && i < count; i++)
        code = stream_wait((void *)n[SIDE], (void *)n[i], 0);
    if (code == 0)
        code = memory_copy((void *)n[TARGET], (const void *)n[SOURCE], n[NBYTES], (int)n[KIND], (void *)n[SIDE]);
    if (code == 0)
        code = event_record((void *)n[DONE], (void *)n[SIDE]);
    Py_END_ALLOW_THREADS
    return PyLong_FromLong(code);
}

static PyMethodDef methods[] = {
    {"use", (PyCFunction)(void (*)(void))use, METH_FASTCALL, use_doc},
    {"copy", (PyCFunction)(void (*)(void))copy, METH_FASTCALL, copy_doc},
    {NULL, NULL, 0, NULL},
};

static int name_source(PyObject *module)
{
    return PyModule_AddStringConstant(module, "SOURCE_DIGEST", SOURCE_DIGEST);
}

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, name_source},
#ifdef Py_mod_multiple_interpreters
    {Py_mod_multiple_interpreters, Py_MOD_PER_INTERPRETER_GIL_SUPPORTED},
#endif
#ifdef Py_mod_gil
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, NULL},
};

/* Initialised in two phases: in one, Python would list it in sys.modules, under whatever name it is given. */
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_copy", NULL, 0, methods, slots, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__copy(void)
{
    return PyModuleDef_Init(&module);
}
