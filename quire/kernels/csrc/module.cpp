// The Python module: one function per op, in the version for this processor, and those that capture and replay calls.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <string>

#include "op.h"
#include "pool.h"

#if defined(__x86_64__)
namespace avx512bf16 {
extern const OpTable ops;
}
namespace avx512vnni {
extern const OpTable ops;
}
namespace avx512 {
extern const OpTable ops;
}
namespace avx2 {
extern const OpTable ops;
}
#endif
namespace any {
extern const OpTable ops;
}

namespace {

const OpTable *ops;
const char *instructions;

void choose_instructions() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    bool dots = avx512 && __builtin_cpu_supports("avx512vnni");
    if (dots && __builtin_cpu_supports("avx512bf16")) {
        ops = &avx512bf16::ops, instructions = "avx512bf16";
        return;
    }
    if (dots) {
        ops = &avx512vnni::ops, instructions = "avx512vnni";
        return;
    }
    if (avx512) {
        ops = &avx512::ops, instructions = "avx512";
        return;
    }
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) {
        ops = &avx2::ops, instructions = "avx2";
        return;
    }
#endif
    ops = &any::ops, instructions = "any";
}

PyObject *begin_capture(PyObject *, PyObject *const *values, Py_ssize_t count) {
    if (count != 2) {
        PyErr_SetString(PyExc_TypeError, "begin_capture(): counts and whether calls are made are expected");
        return nullptr;
    }
    return with_python_errors("begin_capture", [&]() -> PyObject * {
        auto rows = Convert<std::vector<int64_t>>::from_python(values[0], "counts");
        require(!rows.empty(), "counts", "one for each row kind is expected");
        bool runs = Convert<int64_t>::from_python(values[1], "runs");
        if (current_capture) throw ValueError("this thread is capturing already");
        current_capture = new Capture(std::move(rows), runs);
        Py_RETURN_NONE;
    });
}

PyObject *set_row_kind(PyObject *, PyObject *kind) {
    if (!current_capture) Py_RETURN_NONE;
    return with_python_errors("set_row_kind", [&]() -> PyObject * {
        current_capture->set_row_kind(size_t(Convert<int64_t>::from_python(kind, "kind")));
        Py_RETURN_NONE;
    });
}

PyObject *end_capture(PyObject *, PyObject *) {
    if (!current_capture) {
        PyErr_SetString(PyExc_RuntimeError, "end_capture(): this thread is not capturing");
        return nullptr;
    }
    std::shared_ptr<const Capture> calls(std::exchange(current_capture, nullptr));
    if (!calls->complete()) Py_RETURN_NONE;
    return to_python(std::move(calls));
}

PyObject *replay(PyObject *, PyObject *const *values, Py_ssize_t count) {
    if (count != 2) {
        PyErr_SetString(PyExc_TypeError, "replay(): captured calls and counts are expected");
        return nullptr;
    }
    return with_python_errors("replay", [&]() -> PyObject * {
        auto capture = Convert<std::shared_ptr<const Capture>>::from_python(values[0], "calls");
        auto counts = Convert<std::vector<int64_t>>::from_python(values[1], "counts");
        require(counts.size() == capture->kinds(), "counts", "as many as while capturing are expected");
        for (int64_t rows : counts) require(rows >= 0, "counts", "they cannot be negative");
        run_unlocked(UNLOCKED_WORK, [&] { capture->replay(counts); });
        Py_RETURN_NONE;
    });
}

PyObject *supports(PyObject *, PyObject *const *tensors, Py_ssize_t count) {
    DType first = DType::OTHER, dtype;
    for (Py_ssize_t i = 0; i < count; i++) {
        if (!is_supported(tensors[i], dtype)) Py_RETURN_FALSE;
        if (i == 0) first = dtype;
        if (dtype != first) Py_RETURN_FALSE;
    }
    return PyBool_FromLong(first == DType::FLOAT32 || first == DType::BFLOAT16);
}

PyObject *set_threads(PyObject *, PyObject *count) {
    return with_python_errors("set_threads", [&]() -> PyObject * {
        int64_t value = Convert<int64_t>::from_python(count, "count");
        require(value > 0 && value <= 1 << 16, "count", "1 to 65536 threads are expected");
        set_pool_threads(int(value));
        Py_RETURN_NONE;
    });
}

PyObject *pool_calls_for_tests(PyObject *, PyObject *) { return PyLong_FromUnsignedLong(get_pool_calls()); }

PyObject *set_pool_calls_for_tests(PyObject *, PyObject *calls) {
    return with_python_errors("set_pool_calls", [&]() -> PyObject * {
        int64_t value = Convert<int64_t>::from_python(calls, "calls");
        require(value >= 0 && value <= UINT32_MAX && value % 2 == 0, "calls", "an even number of 32 bits is expected");
        set_pool_calls(unsigned(value));
        Py_RETURN_NONE;
    });
}

PyMethodDef functions[] = {
    {"begin_capture", _PyCFunction_CAST(begin_capture), METH_FASTCALL,
     "begin_capture(counts, runs)\n\nKeep this thread's kernel calls from now on, and make them or not."},
    {"set_row_kind", set_row_kind, METH_O, "set_row_kind(kind)\n\nOf the calls that are captured from now on."},
    {"end_capture", end_capture, METH_NOARGS, "end_capture()\n\nThe captured calls, or None if they are incomplete."},
    {"replay", _PyCFunction_CAST(replay), METH_FASTCALL, "replay(calls, counts)\n\nRun captured calls for other counts."},
    {"supports", _PyCFunction_CAST(supports), METH_FASTCALL, "supports(*tensors)\n\nSee quire.kernels.native."},
    {"set_threads", set_threads, METH_O, "set_threads(count)\n\nSee quire.kernels.native."},
    {"pool_calls", pool_calls_for_tests, METH_NOARGS, "pool_calls()\n\nFor tests: the counter of this thread's pool."},
    {"set_pool_calls", set_pool_calls_for_tests, METH_O, "set_pool_calls(calls)\n\nFor tests: sets that counter."},
    {nullptr, nullptr, 0, nullptr},
};

// What Python keeps pointers to: a definition for each op, with its parameters as documentation.
bool add_ops(PyObject *module) {
    static std::vector<PyMethodDef> definitions;
    static std::vector<std::string> documentation;
    for (size_t i = 0; i < ops->count; i++) {
        const OpEntry &op = ops->entries[i];
        if (!op.name) continue;
        std::string text = std::string(op.name) + "(";
        for (size_t at = 0; at < op.parameter_count; at++) text += (at ? ", " : "") + std::string(op.parameters[at]);
        documentation.push_back(text + ")\n\nSee quire/kernels/csrc/ops.");
        definitions.push_back({op.name, _PyCFunction_CAST(op.call), METH_FASTCALL | METH_KEYWORDS, nullptr});
    }
    for (size_t i = 0; i < definitions.size(); i++) definitions[i].ml_doc = documentation[i].c_str();
    definitions.push_back({nullptr, nullptr, 0, nullptr});
    return PyModule_AddFunctions(module, definitions.data()) == 0;
}

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "quire.kernels._native", nullptr, -1, functions,
                          nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__native() {
    if (!find_tensor_type()) return nullptr;
    choose_instructions();
    PyObject *module = PyModule_Create(&definition);
    if (!module) return nullptr;
    if (!add_ops(module) || PyModule_AddStringConstant(module, "INSTRUCTIONS", instructions) < 0) Py_CLEAR(module);
    return module;
}
