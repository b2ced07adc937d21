// The Python module: picks the kernels for this processor and hands them their arguments, which are plain numbers.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <algorithm>
#include <functional>
#include <new>
#include <type_traits>
#include <vector>

#include "arguments.h"

#if defined(__x86_64__)
namespace avx512bf16 {
extern const Kernels float32, bfloat16;
}
namespace avx512 {
extern const Kernels float32, bfloat16;
}
namespace avx2 {
extern const Kernels float32, bfloat16;
}
#endif
namespace any {
extern const Kernels float32, bfloat16;
}

namespace {

const Kernels *kernels[2];  // for float32 and bfloat16
const char *instructions;

void choose() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    if (wide && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni")) {
        kernels[0] = &avx512bf16::float32, kernels[1] = &avx512bf16::bfloat16, instructions = "avx512bf16";
        return;
    }
    if (wide) {
        kernels[0] = &avx512::float32, kernels[1] = &avx512::bfloat16, instructions = "avx512";
        return;
    }
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
        kernels[0] = &avx2::float32, kernels[1] = &avx2::bfloat16, instructions = "avx2";
        return;
    }
#endif
    kernels[0] = &any::float32, kernels[1] = &any::bfloat16, instructions = "any";
}

// Takes the arguments of a call one after the other.
class Arguments {
  public:
    Arguments(PyObject *const *values, Py_ssize_t given, Py_ssize_t wanted) : values_(values) {
        if (given != wanted) PyErr_Format(PyExc_TypeError, "%zd arguments instead of %zd", given, wanted);
    }
    Arguments &operator>>(int64_t &to) {
        to = PyErr_Occurred() ? 0 : PyLong_AsLongLong(*values_++);
        return *this;
    }
    Arguments &operator>>(int &to) {
        int64_t wide;
        *this >> wide;
        to = int(wide);
        return *this;
    }
    Arguments &operator>>(float &to) {
        to = PyErr_Occurred() ? 0.0f : float(PyFloat_AsDouble(*values_++));
        return *this;
    }
    Arguments &operator>>(Pages &to) { return *this >> to.data >> to.head >> to.block >> to.row; }
    template <class T>
    Arguments &operator>>(T *&to) {
        int64_t address;
        *this >> address;
        to = reinterpret_cast<T *>(address);
        return *this;
    }
    template <class T>
    Arguments &operator>>(std::vector<T> &to) {
        PyObject *list = *values_++;
        if (PyErr_Occurred()) return *this;
        if (!PyList_Check(list)) {
            PyErr_SetString(PyExc_TypeError, "not a list");
            return *this;
        }
        to.resize(PyList_GET_SIZE(list));
        for (size_t i = 0; i < to.size(); i++) {
            PyObject *item = PyList_GET_ITEM(list, i);
            to[i] = std::is_integral<T>::value ? T(PyLong_AsLongLong(item)) : T(PyFloat_AsDouble(item));
        }
        return *this;
    }
    bool good() const { return !PyErr_Occurred(); }

  private:
    PyObject *const *values_;
};

constexpr int64_t UNLIKE_OTHERS = -1;  // in place of rows, where they are not all that differs from step to step
constexpr int64_t LONG = 1 << 16;  // numbers from which on other Python threads may run meanwhile

// Calls with the number of rows as their argument, each of which is one of the recorded step's counts.
struct Recording {
    struct Call {
        std::function<void(int64_t)> call;
        size_t count;
    };
    std::vector<int64_t> counts;
    std::vector<Call> calls;
    bool complete = true;  // whether all calls were for such numbers of rows

    template <class Function>
    void add(int64_t rows, Function call) {
        size_t count = std::find(counts.begin(), counts.end(), rows) - counts.begin();
        if (count == counts.size()) complete = false;
        else calls.push_back({call, count});
    }
};
thread_local Recording *recording;  // what this thread's calls are added to, if anything

// Gives whether there was memory for what the kernels need.
template <class Call>
bool succeeds(Call call) {
    try {
        call();
        return true;
    } catch (const std::bad_alloc &) {
        return false;
    }
}

// Calls call(rows). `work`: numbers that it goes through, about.
template <class Call>
PyObject *run(const Arguments &arguments, int64_t rows, int64_t work, Call call) {
    if (!arguments.good()) return nullptr;
    bool done;
    if (work < LONG) {
        done = succeeds([&] { call(rows); });
    } else {
        Py_BEGIN_ALLOW_THREADS done = succeeds([&] { call(rows); });
        Py_END_ALLOW_THREADS
    }
    if (done && recording) done = succeeds([&] { recording->add(rows, call); });
    if (!done) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

constexpr const char *RECORDING = "quire.kernels._native.recording";

PyObject *begin_capture(PyObject *, PyObject *const *values, Py_ssize_t count) {
    Arguments in(values, count, 1);
    std::vector<int64_t> counts;
    in >> counts;
    if (!in.good()) return nullptr;
    if (recording) {
        PyErr_SetString(PyExc_RuntimeError, "this thread is recording already");
        return nullptr;
    }
    recording = new (std::nothrow) Recording{std::move(counts)};
    if (!recording) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

PyObject *end_capture(PyObject *, PyObject *) {
    if (!recording) {
        PyErr_SetString(PyExc_RuntimeError, "this thread is not recording");
        return nullptr;
    }
    bool complete = recording->complete;
    auto drop = [](PyObject *capsule) { delete (Recording *)PyCapsule_GetPointer(capsule, RECORDING); };
    PyObject *made = complete ? PyCapsule_New(recording, RECORDING, drop) : nullptr;
    if (!made) delete recording;
    recording = nullptr;
    if (!complete) Py_RETURN_NONE;
    return made;
}

PyObject *replay(PyObject *, PyObject *const *values, Py_ssize_t count) {
    Arguments in(values + 1, count, 2);
    Recording *recorded = count > 0 ? (Recording *)PyCapsule_GetPointer(values[0], RECORDING) : nullptr;
    std::vector<int64_t> counts;
    in >> counts;
    if (!in.good()) return nullptr;
    if (counts.size() != recorded->counts.size()) {
        PyErr_SetString(PyExc_ValueError, "not as many counts as there were");
        return nullptr;
    }
    bool done;
    Py_BEGIN_ALLOW_THREADS done = succeeds([&] {
        for (auto &call : recorded->calls) call.call(counts[call.count]);
    });
    Py_END_ALLOW_THREADS
    if (!done) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

PyObject *rms_norm(PyObject *, PyObject *const *values, Py_ssize_t count) {
    Arguments in(values, count, 9);
    int narrow;
    RmsNorm a;
    in >> narrow >> a.x >> a.weight >> a.out >> a.rows >> a.stride >> a.dim >> a.eps >> a.offset;
    return run(in, a.rows, a.rows * a.dim, [=](int64_t rows) mutable { a.rows = rows, kernels[narrow]->rms_norm(a); });
}

PyObject *qk_norm_rope(PyObject *, PyObject *const *values, Py_ssize_t count) {
    Arguments in(values, count, 14);
    int narrow;
    QKNormRope a;
    in >> narrow >> a.x >> a.cos >> a.sin >> a.q_weight >> a.k_weight >> a.tokens >> a.q_heads >> a.k_heads >> a.dim >>
        a.stride >> a.pairs >> a.eps >> a.offset;
    return run(in, a.tokens, a.tokens * (a.q_heads + a.k_heads) * a.dim,
               [=](int64_t tokens) mutable { a.tokens = tokens, kernels[narrow]->qk_norm_rope(a); });
}

PyObject *write_pages(PyObject *, PyObject *const *values, Py_ssize_t count) {
    Arguments in(values, count, 20);
    int narrow;
    WritePages a;
    in >> narrow >> a.key_pages >> a.value_pages >> a.slots >> a.keys >> a.values >> a.tokens >> a.heads >> a.block_size >>
        a.key_dim >> a.value_dim >> a.key_stride >> a.value_stride >> a.rounded;
    return run(in, a.tokens, a.tokens * a.heads * (a.key_dim + a.value_dim),
               [=](int64_t tokens) mutable { a.tokens = tokens, kernels[narrow]->write_pages(a); });
}

PyObject *add_scaled(PyObject *, PyObject *const *values, Py_ssize_t count) {
    Arguments in(values, count, 7);
    int narrow;
    AddScaled a;
    in >> narrow >> a.x >> a.y >> a.out >> a.rows >> a.dim >> a.scale;
    return run(in, a.rows, a.rows * a.dim, [=](int64_t rows) mutable { a.rows = rows, kernels[narrow]->add_scaled(a); });
}

PyObject *act_and_mul(PyObject *, PyObject *const *values, Py_ssize_t count) {
    Arguments in(values, count, 6);
    int narrow;
    ActAndMul a;
    in >> narrow >> a.x >> a.out >> a.rows >> a.size >> a.act;
    return run(in, a.rows, a.rows * a.size, [=](int64_t rows) mutable { a.rows = rows, kernels[narrow]->act_and_mul(a); });
}

PyObject *paged_decode(PyObject *, PyObject *const *values, Py_ssize_t count) {
    Arguments in(values, count, 27);
    int narrow;
    PagedDecode a;
    in >> narrow >> a.q >> a.keys >> a.values >> a.out >> a.tables >> a.lengths >> a.sinks >> a.sequences >> a.heads >>
        a.kv_heads >> a.q_stride >> a.key_dim >> a.value_dim >> a.block_size >> a.table_stride >> a.window >> a.scale >>
        a.softcap >> a.rounded;
    int64_t positions = 0;
    in >> positions;
    return run(in, a.sequences, positions * a.heads * a.key_dim,
               [=](int64_t sequences) mutable { a.sequences = sequences, kernels[narrow]->paged_decode(a); });
}

PyObject *paged_varlen(PyObject *, PyObject *const *values, Py_ssize_t count) {
    Arguments in(values, count, 26);
    PagedVarlen a;
    int64_t tokens = 0;
    in >> a.all.q >> a.all.keys >> a.all.values >> a.all.out >> a.all.tables >> a.all.lengths >> a.counts >> a.all.sinks >>
        tokens >> a.all.heads >> a.all.kv_heads >> a.all.q_stride >> a.all.key_dim >> a.all.value_dim >> a.all.block_size >>
        a.all.table_stride >> a.all.window >> a.all.scale >> a.all.softcap >> a.all.rounded;
    return run(in, tokens, LONG, [=](int64_t) { kernels[1]->paged_varlen(a); });
}

PyObject *linear(PyObject *, PyObject *const *values, Py_ssize_t count) {
    Arguments in(values, count, 9);
    Linear a;
    in >> a.x >> a.weight >> a.bias >> a.out >> a.rows >> a.size_in >> a.size_out >> a.x_stride >> a.wide;
    return run(in, a.rows, a.size_in * a.size_out, [=](int64_t rows) mutable { a.rows = rows, kernels[1]->linear(a); });
}

PyObject *quantized_linear(PyObject *, PyObject *const *values, Py_ssize_t count) {
    Arguments in(values, count, 13);
    int narrow;
    QuantizedLinear a;
    in >> narrow >> a.x >> a.weight >> a.scales >> a.corrections >> a.bias >> a.out >> a.rows >> a.size_in >> a.size_out >>
        a.x_stride >> a.bits >> a.wide;
    return run(in, a.rows, a.size_in * a.size_out,
               [=](int64_t rows) mutable { a.rows = rows, kernels[narrow]->quantized_linear(a); });
}

PyObject *take_rows(PyObject *, PyObject *const *values, Py_ssize_t count) {
    Arguments in(values, count, 7);
    TakeRows a;
    in >> a.from >> a.rows >> a.out >> a.count >> a.words >> a.stride >> a.panel;
    return run(in, a.count, a.count * a.words, [=](int64_t rows) mutable { a.count = rows, kernels[0]->take_rows(a); });
}

PyObject *apply_token_bitmask(PyObject *, PyObject *const *values, Py_ssize_t count) {
    Arguments in(values, count, 6);
    ApplyTokenBitmask a;
    in >> a.logits >> a.masks >> a.pairs >> a.count >> a.vocab >> a.words;
    return run(in, UNLIKE_OTHERS, a.count * a.vocab, [=](int64_t) { kernels[0]->apply_token_bitmask(a); });
}

// A list of what the call writes. It is no part of a recording.
template <class Call>
PyObject *listed(const Arguments &arguments, int64_t rows, Call call) {
    if (!arguments.good()) return nullptr;
    std::vector<int64_t> tokens(rows);
    bool done;
    Py_BEGIN_ALLOW_THREADS done = succeeds([&] { call(tokens.data()); });
    Py_END_ALLOW_THREADS
    if (!done) return PyErr_NoMemory();
    PyObject *list = PyList_New(rows);
    for (int64_t i = 0; list && i < rows; i++) {
        PyObject *token = PyLong_FromLongLong(tokens[i]);
        if (!token) Py_CLEAR(list);
        else PyList_SET_ITEM(list, i, token);
    }
    return list;
}

PyObject *argmax(PyObject *, PyObject *const *values, Py_ssize_t count) {
    Arguments in(values, count, 3);
    Argmax a;
    in >> a.logits >> a.rows >> a.vocab;
    return listed(in, a.rows, [a](int64_t *tokens) mutable { a.tokens = tokens, kernels[0]->argmax(a); });
}

PyObject *sample(PyObject *, PyObject *const *values, Py_ssize_t count) {
    Arguments in(values, count, 5);
    Sample a;
    std::vector<float> temperatures;
    std::vector<double> randoms;
    in >> a.logits >> temperatures >> randoms >> a.rows >> a.vocab;
    a.temperatures = temperatures.data(), a.randoms = randoms.data();
    return listed(in, a.rows, [a](int64_t *tokens) mutable { a.tokens = tokens, kernels[0]->sample(a); });
}

// Lays out a step's spans of tokens, and the last tokens of those that end in one which gives another. Gives the last of
// the blocks that it writes to.
PyObject *build_inputs(PyObject *, PyObject *const *values, Py_ssize_t count) {
    Arguments in(values, count, 18);
    std::vector<int64_t> rows, starts, sizes, ends;
    const int32_t *known, *blocks;
    int32_t *tables, *end_tables;
    int64_t known_stride, stride, block_size, *tokens, *positions, *slots, *lengths, *counts, *end_rows, *end_lengths;
    in >> rows >> starts >> sizes >> ends >> known >> known_stride >> blocks >> stride >> block_size >> tokens >> positions >>
        slots >> lengths >> counts >> tables >> end_rows >> end_lengths >> end_tables;
    if (!in.good()) return nullptr;
    int64_t last = 0, at = 0;
    std::vector<int64_t> behind(rows.size());
    auto copy_table = [&](size_t span, int32_t *to) {
        const int32_t *own = blocks + rows[span] * stride;
        std::copy(own, own + (starts[span] + sizes[span] - 1) / block_size + 1, to);
    };
    *counts++ = int64_t(rows.size());
    for (size_t i = 0; i < rows.size(); i++) {
        for (int64_t position = starts[i]; position < starts[i] + sizes[i]; position++, at++) {
            int64_t block = blocks[rows[i] * stride + position / block_size];
            tokens[at] = known[rows[i] * known_stride + position], positions[at] = position;
            slots[at] = block * block_size + position % block_size;
            last = std::max(last, block);
        }
        counts[i] = sizes[i], lengths[i] = starts[i] + sizes[i], behind[i] = at;
        copy_table(i, tables + i * stride);
    }
    for (size_t i = 0; i < ends.size(); i++) {
        end_rows[i] = behind[ends[i]] - 1, end_lengths[i] = lengths[ends[i]];
        copy_table(ends[i], end_tables + i * stride);
    }
    return PyLong_FromLongLong(last);
}

PyMethodDef methods[] = {
    {"rms_norm", _PyCFunction_CAST(rms_norm), METH_FASTCALL, nullptr},
    {"qk_norm_rope", _PyCFunction_CAST(qk_norm_rope), METH_FASTCALL, nullptr},
    {"write_pages", _PyCFunction_CAST(write_pages), METH_FASTCALL, nullptr},
    {"add_scaled", _PyCFunction_CAST(add_scaled), METH_FASTCALL, nullptr},
    {"act_and_mul", _PyCFunction_CAST(act_and_mul), METH_FASTCALL, nullptr},
    {"paged_decode", _PyCFunction_CAST(paged_decode), METH_FASTCALL, nullptr},
    {"paged_varlen", _PyCFunction_CAST(paged_varlen), METH_FASTCALL, nullptr},
    {"linear", _PyCFunction_CAST(linear), METH_FASTCALL, nullptr},
    {"quantized_linear", _PyCFunction_CAST(quantized_linear), METH_FASTCALL, nullptr},
    {"build_inputs", _PyCFunction_CAST(build_inputs), METH_FASTCALL, nullptr},
    {"take_rows", _PyCFunction_CAST(take_rows), METH_FASTCALL, nullptr},
    {"apply_token_bitmask", _PyCFunction_CAST(apply_token_bitmask), METH_FASTCALL, nullptr},
    {"argmax", _PyCFunction_CAST(argmax), METH_FASTCALL, nullptr},
    {"sample", _PyCFunction_CAST(sample), METH_FASTCALL, nullptr},
    {"begin_capture", _PyCFunction_CAST(begin_capture), METH_FASTCALL, nullptr},
    {"end_capture", end_capture, METH_NOARGS, nullptr},
    {"replay", _PyCFunction_CAST(replay), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "quire.kernels._native", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__native() {
    choose();
    PyObject *made = PyModule_Create(&module);
    if (made && PyModule_AddStringConstant(made, "INSTRUCTIONS", instructions) < 0) Py_CLEAR(made);
    return made;
}
