//! Kernels for GPUs of whatever computes each element of its outputs from one element of each input: elementwise ops, chains of them,
//! and updates of parameters. Their text is generated from formulas; inputs broadcast.
//!
//! A thread takes as many neighbouring elements as fit into 16 bytes, reads all of them and then writes, so an output may be an
//! input's memory. Where sizes or addresses do not allow that, it takes them one by one.

use kolo_graph::cuda::{self, ChannelsLast, CudaArg, CudaCalls, CudaCx, CudaPlace, CudaSource, Launch, cuda_type};
use kolo_graph::formula::{Formula, literal};
use kolo_graph::{DType, Op, Type};
use std::fmt::Write;

/// Threads of a block.
const BLOCK: usize = 256;
/// Blocks for each multiprocessor, at most; a thread then takes several places in turn.
const BLOCKS_PER_MULTIPROCESSOR: usize = 16;
/// What a thread reads or writes at once.
const PACK_BYTES: usize = 16;

/// How a kernel computes one element.
#[derive(Clone, Debug, Default)]
pub(crate) struct Map {
    /// Device functions that the body calls.
    pub functions: String,
    /// Runs once in each thread before any element; it sees the scalars.
    pub setup: String,
    /// Computes `y0`, `y1`, … from `x0`, `x1`, …, as [`Formula::to_c`] types them.
    pub body: String,
    /// How many of the inputs, the last ones, are numbers for the setup.
    pub scalars: usize,
}

/// Qualifiers of generated functions.
pub(crate) const INLINE: &str = "static __device__ __forceinline__";

impl Map {
    /// That of one op with a formula, whose numbers are known.
    pub fn of(op: &dyn Op, inputs: &[Type]) -> Option<Self> {
        let formula = op.formula()?;
        let dtypes: Vec<DType> = inputs.iter().map(|ty| ty.dtype).collect();
        let mut map = Self { functions: formula.to_c(INLINE, "element", &dtypes), ..Self::default() };
        let operands: Vec<String> = (0..inputs.len()).map(|at| format!("x{at}")).collect();
        map.call(&formula, "element", "y0", &operands, &op.formula_numbers(&[]), formula.result_type(&dtypes));
        Some(map)
    }

    /// Its first result as a function of its inputs, all of them floats, for kernels that do more than this.
    pub fn device_function(&self, name: &str, inputs: usize) -> String {
        let parameters: Vec<String> = (0..inputs).map(|at| format!("float x{at}")).collect();
        let Map { functions, body, .. } = self;
        format!("{functions}{INLINE} float {name}({}) {{\n{body}return y0;\n}}\n", parameters.join(", "))
    }

    /// A line of the body that names the result of a function.
    pub fn call(
        &mut self,
        formula: &Formula,
        function: &str,
        result: &str,
        operands: &[String],
        numbers: &[f64],
        ty: &str,
    ) {
        debug_assert_eq!(formula.results.len(), 1, "one result has a name");
        let numbers = numbers.iter().map(|number| literal(*number as f32));
        let operands: Vec<String> = operands.iter().cloned().chain(numbers).collect();
        let _ = writeln!(self.body, "const {ty} {result} = {function}({});", operands.join(", "));
    }

    /// The one call that runs it.
    pub fn calls(&self, cx: &CudaCx<'_>) -> CudaCalls {
        if cx.channels_last {
            let in_memory = |types: &[Type]| types.iter().map(type_in_memory).collect::<Vec<_>>();
            let (inputs, outputs) = (in_memory(cx.inputs), in_memory(cx.outputs));
            return self.calls(&CudaCx::new(&inputs, &outputs, cx.target));
        }
        let shape = &cx.outputs[0].shape;
        let count = cx.outputs[0].elements();
        let tensors = cx.inputs.len() - self.scalars;
        let widest = cx.inputs[..tensors].iter().chain(cx.outputs).map(|ty| ty.dtype.bytes()).max().unwrap_or(4);
        let width = PACK_BYTES / widest;
        let walks: Vec<Walk> = cx.inputs[..tensors].iter().map(|ty| Walk::new(ty, shape)).collect();
        let text = Text { map: self, cx, walks: &walks, dims: dims(&walks, shape), width, count };
        let source = CudaSource::new(text.whole());
        let most = cx.target.multiprocessors as usize * BLOCKS_PER_MULTIPROCESSOR;
        let blocks = count.div_ceil(width).div_ceil(BLOCK).min(most);
        let inputs = (0..cx.inputs.len()).map(CudaPlace::input);
        let places = inputs.chain((0..cx.outputs.len()).map(CudaPlace::output));
        Launch::new(source, "map", [blocks, 1, 1], BLOCK, places.map(CudaArg::from).collect::<Vec<_>>()).into()
    }
}

/// How an input lies under the output.
enum Walk {
    /// Element for element.
    Same,
    /// One element for all.
    One,
    /// By these strides along the output's dims, 0 where it stretches.
    Strided(Vec<usize>),
}

impl Walk {
    fn new(input: &Type, shape: &[usize]) -> Self {
        if input.elements() == kolo_graph::types::count(shape) {
            return Walk::Same;
        }
        if input.elements() == 1 {
            return Walk::One;
        }
        let own = kolo_graph::types::strides(&input.shape);
        let skip = shape.len() - input.rank();
        let stride = |dim: usize| match dim.checked_sub(skip) {
            Some(at) if input.shape[at] != 1 => own[at],
            _ => 0,
        };
        Walk::Strided((0..shape.len()).map(stride).collect())
    }
}

/// The output's dims as few as they can be: neighbours that every input walks as one are one.
struct Dim {
    size: usize,
    /// Of each strided input.
    strides: Vec<usize>,
}

fn dims(walks: &[Walk], shape: &[usize]) -> Vec<Dim> {
    let strided: Vec<&Vec<usize>> =
        walks.iter().filter_map(|walk| if let Walk::Strided(strides) = walk { Some(strides) } else { None }).collect();
    let mut dims: Vec<Dim> = Vec::new();
    for (at, size) in shape.iter().copied().enumerate().filter(|(_, size)| *size != 1) {
        let strides: Vec<usize> = strided.iter().map(|strides| strides[at]).collect();
        match dims.last_mut() {
            Some(last) if last.strides.iter().zip(&strides).all(|(outer, inner)| *outer == inner * size) => {
                *last = Dim { size: last.size * size, strides };
            }
            _ => dims.push(Dim { size, strides }),
        }
    }
    dims
}

/// Writes the source of a kernel.
struct Text<'a> {
    map: &'a Map,
    cx: &'a CudaCx<'a>,
    walks: &'a [Walk],
    dims: Vec<Dim>,
    width: usize,
    count: usize,
}

impl Text<'_> {
    fn whole(&self) -> String {
        let (inputs, outputs) = (self.cx.inputs, self.cx.outputs);
        let mut parameters: Vec<String> = Vec::new();
        parameters.extend(inputs.iter().enumerate().map(|(at, ty)| format!("const {} *p{at}", cuda_type(ty.dtype))));
        parameters.extend(outputs.iter().enumerate().map(|(at, ty)| format!("{} *q{at}", cuda_type(ty.dtype))));
        let mut text = self.map.functions.clone();
        self.index_functions(&mut text);
        let (width, count) = (self.width, self.count);
        let _ = writeln!(text, "extern \"C\" __global__ void map({}) {{", parameters.join(", "));
        let once = |at: &usize| *at >= self.walks.len() || matches!(self.walks[*at], Walk::One);
        for at in (0..inputs.len()).filter(once) {
            let _ = writeln!(
                text,
                "const {} x{at} = {};",
                value_type(inputs[at].dtype),
                load(inputs[at].dtype, &format!("p{at}[0]"))
            );
        }
        text.push_str(&self.map.setup);
        let _ = writeln!(text, "const u64 addresses = {};", self.addresses());
        let _ = writeln!(text, "const i64 stride = (i64)gridDim.x * {BLOCK} * {width};");
        let _ = writeln!(
            text,
            "for (i64 start = ((i64)blockIdx.x * {BLOCK} + threadIdx.x) * {width}; start < {count}; start += stride) {{"
        );
        if width > 1 {
            let _ = writeln!(text, "if (addresses % {PACK_BYTES} == 0 && start + {width} <= {count}) {{");
            self.packed(&mut text);
            text.push_str("continue;\n}\n");
        }
        let _ = writeln!(text, "for (i64 at = start; at < start + {width} && at < {count}; at++) {{");
        self.single(&mut text);
        text.push_str("}\n}\n}\n");
        text
    }

    /// All addresses that are read or written in packs, or-ed: aligned if that is.
    fn addresses(&self) -> String {
        let packed = |at: &usize| matches!(self.walks[*at], Walk::Same) || self.packs(*at);
        let inputs = (0..self.walks.len()).filter(packed).map(|at| format!("(u64)p{at}"));
        let outputs = (0..self.cx.outputs.len()).map(|at| format!("(u64)q{at}"));
        inputs.chain(outputs).collect::<Vec<_>>().join(" | ")
    }

    /// The number among the strided inputs.
    fn strided_number(&self, input: usize) -> usize {
        self.walks[..input].iter().filter(|walk| matches!(walk, Walk::Strided(_))).count()
    }

    /// The stride of a strided input along the innermost dim, if a pack never crosses its end.
    fn innermost(&self, input: usize) -> Option<usize> {
        let last = self.dims.last().filter(|last| last.size % self.width == 0)?;
        Some(last.strides[self.strided_number(input)])
    }

    /// Whether a strided input is read in packs.
    fn packs(&self, input: usize) -> bool {
        matches!(self.walks[input], Walk::Strided(_)) && self.innermost(input) == Some(1)
    }

    /// One function for each strided input: where it has element `at` of the output.
    fn index_functions(&self, text: &mut String) {
        let number = if self.count < 1 << 31 { "u32" } else { "u64" };
        for at in (0..self.walks.len()).filter(|at| matches!(self.walks[*at], Walk::Strided(_))) {
            let which = self.strided_number(at);
            let _ = writeln!(text, "{INLINE} i64 index{at}({number} at) {{\nu64 index = 0;");
            for (place, dim) in self.dims.iter().enumerate().rev() {
                let digit = if place == 0 { "at".to_string() } else { format!("at % {}u", dim.size) };
                if dim.strides[which] != 0 {
                    let _ = writeln!(text, "index += (u64)({digit}) * {}ull;", dim.strides[which]);
                }
                if place > 0 {
                    let _ = writeln!(text, "at /= {}u;", dim.size);
                }
            }
            text.push_str("return (i64)index;\n}\n");
        }
    }

    /// The body for one element.
    fn single(&self, text: &mut String) {
        for (at, walk) in self.walks.iter().enumerate() {
            let dtype = self.cx.inputs[at].dtype;
            let place = match walk {
                Walk::One => continue,
                Walk::Same => format!("p{at}[at]"),
                Walk::Strided(_) => format!("p{at}[index{at}(at)]"),
            };
            let _ = writeln!(text, "const {} x{at} = {};", value_type(dtype), load(dtype, &place));
        }
        text.push_str(&self.map.body);
        for (at, output) in self.cx.outputs.iter().enumerate() {
            let _ = writeln!(text, "q{at}[at] = {};", store(output.dtype, &format!("y{at}")));
        }
    }

    /// The body for a pack of elements.
    fn packed(&self, text: &mut String) {
        let width = self.width;
        let pack = |dtype: DType| format!("Pack<{}, {width}>", cuda_type(dtype));
        for (at, walk) in self.walks.iter().enumerate() {
            let dtype = self.cx.inputs[at].dtype;
            let place = match walk {
                Walk::One => continue,
                Walk::Same => format!("p{at} + start"),
                Walk::Strided(_) if self.packs(at) => format!("p{at} + index{at}(start)"),
                Walk::Strided(_) if self.innermost(at) == Some(0) => {
                    let _ = writeln!(text, "const {} v{at} = p{at}[index{at}(start)];", cuda_type(dtype));
                    continue;
                }
                Walk::Strided(_) => continue,
            };
            let _ = writeln!(text, "const {} v{at} = load_pack<{}, {width}>({place});", pack(dtype), cuda_type(dtype));
        }
        for (at, output) in self.cx.outputs.iter().enumerate() {
            let _ = writeln!(text, "{} w{at};", pack(output.dtype));
        }
        let _ = writeln!(text, "#pragma unroll\nfor (int lane = 0; lane < {width}; lane++) {{");
        for (at, walk) in self.walks.iter().enumerate() {
            let dtype = self.cx.inputs[at].dtype;
            let place = match walk {
                Walk::One => continue,
                Walk::Strided(_) if self.innermost(at) == Some(0) => format!("v{at}"),
                Walk::Strided(_) if !self.packs(at) => format!("p{at}[index{at}(start + lane)]"),
                _ => format!("v{at}.at[lane]"),
            };
            let _ = writeln!(text, "const {} x{at} = {};", value_type(dtype), load(dtype, &place));
        }
        text.push_str(&self.map.body);
        for (at, output) in self.cx.outputs.iter().enumerate() {
            let _ = writeln!(text, "w{at}.at[lane] = {};", store(output.dtype, &format!("y{at}")));
        }
        text.push_str("}\n");
        for (at, output) in self.cx.outputs.iter().enumerate() {
            let _ = writeln!(text, "store_pack<{}, {width}>(q{at} + start, w{at});", cuda_type(output.dtype));
        }
    }
}

/// What an element is while it is computed with.
pub(crate) fn value_type(dtype: DType) -> &'static str {
    if dtype.is_float() { "float" } else { cuda_type(dtype) }
}

fn load(dtype: DType, place: &str) -> String {
    if dtype.is_float() { format!("to_float({place})") } else { place.into() }
}

fn store(dtype: DType, value: &str) -> String {
    let ty = cuda_type(dtype);
    if dtype.is_float() { format!("from_float<{ty}>({value})") } else { format!("({ty})({value})") }
}

/// An operand beside `[n, h, w, c]`, if its memory has the order of its type.
fn type_in_memory(ty: &Type) -> Type {
    let skip = 4usize.saturating_sub(ty.rank());
    let size = |dim: usize| dim.checked_sub(skip).map_or(1, |at| ty.shape[at]);
    if ty.rank() > 4 { ty.clone() } else { cuda::last(&Type::new(ty.dtype, [size(0), size(1), size(2), size(3)])) }
}

/// All operands of four dims: whatever is done element for element is done in any order. What stretches must look the same in
/// both orders.
pub(crate) fn channels_last(cx: &CudaCx<'_>) -> Option<ChannelsLast> {
    let four = |types: &[Type]| (0..types.len()).filter(|at| types[*at].rank() == 4).collect::<Vec<_>>();
    let (inputs, outputs) = (four(cx.inputs), four(cx.outputs));
    let stretches = |ty: &Type| {
        let skip = 4usize.checked_sub(ty.rank());
        skip.is_some_and(|skip| {
            skip == 0 || cuda::any_order(&Type::new(ty.dtype, [&[1; 4][..skip], &ty.shape].concat()))
        })
    };
    let fits = outputs.len() == cx.outputs.len() && cx.inputs.iter().all(stretches);
    fits.then_some(ChannelsLast { inputs, outputs, gains: false })
}

/// The calls of an op whose formula says everything.
pub(crate) fn formula_calls(op: &dyn Op, cx: &CudaCx<'_>) -> CudaCalls {
    Map::of(op, cx.inputs).expect("an elementwise op has a formula").calls(cx)
}
