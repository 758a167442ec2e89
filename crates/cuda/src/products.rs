//! Matrix products by cuBLASLt.
//!
//! The library is asked once per product which algorithms to use, with everything that its answer may depend on fixed: sizes, types,
//! strides, alignment and workspace. Algorithms that add parts of a sum in an order of their own are ruled out. Of those with the bits of its
//! first choice the fastest is taken ([`crate::product_trials`]). So the same product has the same bits in every run and on every
//! rank.

use crate::description::Description;
use crate::driver::{DevicePointer, Handle};
use crate::error::CudaError;
use crate::gpu::{DeviceInfo, Gpu};
use crate::kernel_cache::{CacheKind, KernelCache};
use crate::library::{Library, LibraryName, functions};
use crate::memory::DeviceMemory;
use crate::product_trials::{CANDIDATES_MAX, Contest, Data, TRIALS_SECONDS_MAX, TrialMemory, is_worth_it, winner};
use kolo_base::lock;
use kolo_graph::DType;
use kolo_graph::cuda::{CudaMatrix, Product};
use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Instant;

pub(crate) const CUBLASLT: LibraryName = LibraryName {
    title: "cuBLASLt (libcublasLt)",
    files: &["libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"],
    wheels: &["cu13", "cublas"],
    needed_for: "matrix products on the GPU",
    hint: "install a CUDA toolkit, or `pip install nvidia-cublas` and set VIRTUAL_ENV or LD_LIBRARY_PATH",
};

functions! {
    CublasLt:
    version = "cublasLtGetVersion" ();
    create = "cublasLtCreate" (*mut Handle);
    desc_create = "cublasLtMatmulDescCreate" (*mut Handle, c_int, c_int);
    desc_set = "cublasLtMatmulDescSetAttribute" (Handle, c_int, *const c_void, usize);
    desc_destroy = "cublasLtMatmulDescDestroy" (Handle);
    layout_create = "cublasLtMatrixLayoutCreate" (*mut Handle, c_int, u64, u64, i64);
    layout_set = "cublasLtMatrixLayoutSetAttribute" (Handle, c_int, *const c_void, usize);
    layout_destroy = "cublasLtMatrixLayoutDestroy" (Handle);
    preference_create = "cublasLtMatmulPreferenceCreate" (*mut Handle);
    preference_set = "cublasLtMatmulPreferenceSetAttribute" (Handle, c_int, *const c_void, usize);
    preference_destroy = "cublasLtMatmulPreferenceDestroy" (Handle);
    heuristic = "cublasLtMatmulAlgoGetHeuristic" (
        Handle, Handle, Handle, Handle, Handle, Handle, Handle, c_int, *mut Choice, *mut c_int
    );
    matmul = "cublasLtMatmul" (
        Handle, Handle, *const c_void, DevicePointer, Handle, DevicePointer, Handle, *const c_void, DevicePointer, Handle,
        DevicePointer, Handle, *const Algorithm, DevicePointer, usize, Handle
    );
}

/// Bytes that every product may use between its parts: what the vendor recommends for a Hopper. It is part of the choice of an
/// algorithm, so it never changes.
const WORKSPACE_BYTES: usize = 32 << 20;
/// What operands are taken to be aligned to, at most: all that the fast kernels ask for. Places in memory differ from layout to
/// layout, and the choice must not.
const ALIGNMENT_BYTES: u32 = 16;

/// `cublasLtMatmulDescAttributes_t`, `cublasLtMatrixLayoutAttribute_t`, `cublasLtMatmulPreferenceAttributes_t`.
const TRANSPOSE_A: c_int = 3;
const TRANSPOSE_B: c_int = 4;
const EPILOGUE: c_int = 7;
const BIAS_POINTER: c_int = 8;
const BATCH_COUNT: c_int = 5;
const BATCH_STRIDE: c_int = 6;
const WORKSPACE_MAX: c_int = 1;
const REDUCTION_MASK: c_int = 3;
const ALIGNMENT_FIRST: c_int = 5;
/// Parts of a sum are kept apart in f32 and added in one order.
const REDUCTION_IN_ORDER: u32 = 2;
const EPILOGUE_BIAS: c_int = 4;
const COMPUTE_F32: c_int = 68;
const COMPUTE_TF32: c_int = 77;

#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Algorithm([u64; 8]);

impl Algorithm {
    const EMPTY: Self = Self([0; 8]);

    fn to_bytes(self) -> Vec<u8> {
        self.0.iter().flat_map(|word| word.to_le_bytes()).collect()
    }
}

/// `cublasLtMatmulHeuristicResult_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Choice {
    algorithm: Algorithm,
    workspace_bytes: usize,
    state: c_int,
    waves: f32,
    reserved: [c_int; 4],
}

impl Choice {
    const EMPTY: Self =
        Self { algorithm: Algorithm::EMPTY, workspace_bytes: 0, state: 0, waves: 0.0, reserved: [0; 4] };
}

/// The library on one GPU, opened with the first product.
#[derive(Debug, Default)]
pub(crate) struct Products(OnceLock<Result<Open, CudaError>>);

#[derive(Debug)]
struct Open {
    functions: CublasLt,
    handle: Handle,
    workspace: DeviceMemory,
    /// What the library answered: a recurrent layer asks for the same product at every step.
    chosen: Mutex<BTreeMap<ProductKey, Algorithm>>,
    /// Seconds that trials have taken.
    tried_seconds: Mutex<f64>,
    cache: Option<KernelCache>,
}

// SAFETY: the library's handle may be used from any thread.
unsafe impl Send for Open {}
// SAFETY: as above.
unsafe impl Sync for Open {}

impl Open {
    fn new(gpu: &Arc<Gpu>) -> Result<Self, CudaError> {
        let functions = CublasLt::load(&Library::open(CUBLASLT)?)?;
        gpu.enter()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: the place of a handle, in the context of this GPU.
        check(gpu, "cublasLtCreate", unsafe { (functions.create)(&mut handle) })?;
        let workspace = DeviceMemory::new(gpu, WORKSPACE_BYTES)?;
        let (chosen, tried_seconds) = (Mutex::default(), Mutex::default());
        let cache = KernelCache::of_user(CacheKind::Algorithm);
        Ok(Self { functions, handle, workspace, chosen, tried_seconds, cache })
    }
}

/// `cublasStatus_t` as an error.
fn check(gpu: &Gpu, call: &'static str, code: c_int) -> Result<(), CudaError> {
    let text = match code {
        0 => return Ok(()),
        1 => "not initialised",
        3 => "out of memory",
        7 => "a wrong value",
        8 => "not for this GPU",
        13 => "the kernel failed",
        15 => "not supported",
        _ => "failed",
    };
    let hint = "if it happens again, check `nvidia-smi`, and report it with the output of `kolo devices`";
    Err(CudaError::Call { call, device: gpu.info.name.clone(), code, text: text.into(), hint })
}

/// A product with its operands resolved and its algorithm chosen.
#[derive(Debug)]
pub(crate) struct ProductCall {
    operation: Description,
    a: Description,
    b: Description,
    c: Description,
    algorithm: Algorithm,
    alpha: f32,
    beta: f32,
    /// Left and right as the library sees them, and the result.
    addresses: [DevicePointer; 3],
}

// SAFETY: descriptions may be used from any thread, one call at a time.
unsafe impl Send for ProductCall {}
// SAFETY: as above; they are only read.
unsafe impl Sync for ProductCall {}

fn type_code(dtype: DType) -> Result<c_int, CudaError> {
    match dtype {
        DType::F32 => Ok(0),
        DType::F16 => Ok(2),
        DType::BF16 => Ok(14),
        other => Err(CudaError::Other(format!("matrices of {} cannot be multiplied", other.name()))),
    }
}

/// How a product computes.
fn compute_code(product: &Product, tf32: bool) -> c_int {
    let is_f32 = product.a.dtype == DType::F32 && product.b.dtype == DType::F32;
    if is_f32 && tf32 { COMPUTE_TF32 } else { COMPUTE_F32 }
}

/// What all matrices of a batch are aligned to, as far as it matters, if each starts so many bytes after the one before. Told of the
/// first alone, the library takes kernels that read the others from wrong places.
fn alignment(first: DevicePointer, step: usize) -> u32 {
    1 << (first | step as u64).trailing_zeros().min(ALIGNMENT_BYTES.trailing_zeros())
}

/// All that the choice of an algorithm depends on.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct ProductKey {
    sizes: [usize; 4],
    /// Of each matrix its type, strides and whether it lies transposed.
    matrices: [(c_int, usize, usize, bool); 3],
    compute: c_int,
    alignments: [u32; 3],
    has_bias: bool,
    adds: bool,
}

impl ProductKey {
    fn of(product: &Product, compute: c_int, alignments: [u32; 3]) -> Self {
        let Product { rows, columns, depth, batch, .. } = *product;
        let matrix =
            |of: &CudaMatrix| (type_code(of.dtype).unwrap_or(-1), of.row_stride, of.batch_stride, of.transposed);
        let matrices = [&product.a, &product.b, &product.c].map(matrix);
        let (has_bias, adds) = (product.bias.is_some(), product.beta != 0.0);
        Self { sizes: [rows, columns, depth, batch], matrices, compute, alignments, has_bias, adds }
    }
}

impl Products {
    fn open<'p>(&'p self, gpu: &Arc<Gpu>) -> Result<&'p Open, CudaError> {
        self.0.get_or_init(|| Open::new(gpu)).as_ref().map_err(CudaError::clone)
    }

    /// Chooses how to run a product, on operands at these addresses.
    pub fn compile(
        &self,
        gpu: &Arc<Gpu>,
        product: &Product,
        tf32: bool,
        [a, b, c]: [DevicePointer; 3],
        bias: Option<DevicePointer>,
    ) -> Result<ProductCall, CudaError> {
        let open = self.open(gpu)?;
        gpu.enter()?;
        let mut call = open.describe(gpu, product, tf32, [a, b, c], bias)?;
        let [of_a, of_b, of_c] = [(a, &product.a), (b, &product.b), (c, &product.c)].map(|(address, matrix)| {
            let step = if product.batch > 1 { matrix.batch_stride * matrix.dtype.bytes() } else { 0 };
            alignment(address, step)
        });
        let key = ProductKey::of(product, compute_code(product, tf32), [of_b, of_a, of_c]);
        let known = lock(&open.chosen).get(&key).copied();
        call.algorithm = match known {
            Some(algorithm) => algorithm,
            None => {
                let candidates = open.candidates(gpu, product, &call, [of_b, of_a, of_c, of_c])?;
                open.choose(gpu, product, tf32, &key, &candidates)?
            }
        };
        lock(&open.chosen).insert(key, call.algorithm);
        Ok(call)
    }

    /// Starts a product in the order of the compute stream.
    pub fn run(&self, gpu: &Arc<Gpu>, call: &ProductCall) -> Result<(), CudaError> {
        self.open(gpu)?.run(gpu, call)
    }
}

/// Gives an attribute of a description its value.
macro_rules! set {
    ($open:ident, $gpu:ident, $function:ident, $handle:expr, $attribute:expr, $value:expr) => {{
        let value = $value;
        let place = std::ptr::from_ref(&value).cast::<c_void>();
        // SAFETY: a description of the library's, and a value of the attribute's size.
        let code = unsafe { ($open.functions.$function)($handle, $attribute, place, size_of_val(&value)) };
        check($gpu, concat!("cublasLt ", stringify!($function)), code)
    }};
}

impl Open {
    fn run(&self, gpu: &Gpu, call: &ProductCall) -> Result<(), CudaError> {
        gpu.enter()?;
        let [a, b, c] = call.addresses;
        let number = |number: &f32| std::ptr::from_ref(number).cast::<c_void>();
        // SAFETY: descriptions of memory that the layout placed, two numbers of the host, and a workspace of its size that only
        // this stream uses.
        let code = unsafe {
            (self.functions.matmul)(
                self.handle,
                call.operation.handle,
                number(&call.alpha),
                a,
                call.a.handle,
                b,
                call.b.handle,
                number(&call.beta),
                c,
                call.c.handle,
                c,
                call.c.handle,
                &call.algorithm,
                self.workspace.at(0),
                WORKSPACE_BYTES,
                gpu.compute.handle,
            )
        };
        check(gpu, "cublasLtMatmul", code)
    }

    /// A product on these operands that has no algorithm yet. The library counts by columns: it is told the product of the
    /// transposes, whose memory is the same.
    fn describe(
        &self,
        gpu: &Gpu,
        product: &Product,
        tf32: bool,
        [a, b, c]: [DevicePointer; 3],
        bias: Option<DevicePointer>,
    ) -> Result<ProductCall, CudaError> {
        let Product { rows, columns, depth, batch, alpha, beta, .. } = *product;
        Ok(ProductCall {
            operation: self.operation(gpu, product, compute_code(product, tf32), bias)?,
            a: self.layout(gpu, &product.b, [columns, depth], batch)?,
            b: self.layout(gpu, &product.a, [depth, rows], batch)?,
            c: self.layout(gpu, &product.c, [columns, rows], batch)?,
            algorithm: Algorithm::EMPTY,
            alpha,
            beta,
            addresses: [b, a, c],
        })
    }

    fn operation(
        &self,
        gpu: &Gpu,
        product: &Product,
        compute: c_int,
        bias: Option<DevicePointer>,
    ) -> Result<Description, CudaError> {
        let mut handle = std::ptr::null_mut();
        // SAFETY: the place of a handle.
        let code = unsafe { (self.functions.desc_create)(&mut handle, compute, 0) };
        check(gpu, "cublasLtMatmulDescCreate", code)?;
        let made = Description { handle, destroy: self.functions.desc_destroy };
        set!(self, gpu, desc_set, handle, TRANSPOSE_A, c_int::from(product.b.transposed))?;
        set!(self, gpu, desc_set, handle, TRANSPOSE_B, c_int::from(product.a.transposed))?;
        if let Some(bias) = bias {
            set!(self, gpu, desc_set, handle, EPILOGUE, EPILOGUE_BIAS)?;
            set!(self, gpu, desc_set, handle, BIAS_POINTER, bias)?;
        }
        Ok(made)
    }

    /// A matrix of `size` as the library counts, whose memory may hold its transpose.
    fn layout(&self, gpu: &Gpu, matrix: &CudaMatrix, size: [usize; 2], batch: usize) -> Result<Description, CudaError> {
        let [rows, columns] = if matrix.transposed { [size[1], size[0]] } else { size };
        let (mut handle, dtype) = (std::ptr::null_mut(), type_code(matrix.dtype)?);
        // A matrix of one row in memory may have any stride, but none below its length.
        let stride = matrix.row_stride.max(rows) as i64;
        // SAFETY: the place of a handle.
        let code = unsafe { (self.functions.layout_create)(&mut handle, dtype, rows as u64, columns as u64, stride) };
        check(gpu, "cublasLtMatrixLayoutCreate", code)?;
        let made = Description { handle, destroy: self.functions.layout_destroy };
        if batch > 1 {
            set!(self, gpu, layout_set, handle, BATCH_COUNT, batch as i32)?;
            set!(self, gpu, layout_set, handle, BATCH_STRIDE, matrix.batch_stride as i64)?;
        }
        Ok(made)
    }

    /// The algorithms that the library names for a product, its first choice first.
    fn candidates(
        &self,
        gpu: &Gpu,
        product: &Product,
        call: &ProductCall,
        alignments: [u32; 4],
    ) -> Result<Vec<Algorithm>, CudaError> {
        let mut handle = std::ptr::null_mut();
        // SAFETY: the place of a handle.
        check(gpu, "cublasLtMatmulPreferenceCreate", unsafe { (self.functions.preference_create)(&mut handle) })?;
        let preference = Description { handle, destroy: self.functions.preference_destroy };
        set!(self, gpu, preference_set, preference.handle, WORKSPACE_MAX, WORKSPACE_BYTES)?;
        set!(self, gpu, preference_set, preference.handle, REDUCTION_MASK, REDUCTION_IN_ORDER)?;
        for (at, bytes) in alignments.into_iter().enumerate() {
            set!(self, gpu, preference_set, preference.handle, ALIGNMENT_FIRST + at as c_int, bytes)?;
        }
        let mut choices = [Choice::EMPTY; CANDIDATES_MAX];
        let mut found = 0;
        // SAFETY: descriptions of the library's, and the places of as many results as said.
        let code = unsafe {
            (self.functions.heuristic)(
                self.handle,
                call.operation.handle,
                call.a.handle,
                call.b.handle,
                call.c.handle,
                call.c.handle,
                preference.handle,
                choices.len() as c_int,
                choices.as_mut_ptr(),
                &mut found,
            )
        };
        check(gpu, "cublasLtMatmulAlgoGetHeuristic", code)?;
        let choices = &choices[..(found.max(0) as usize).min(CANDIDATES_MAX)];
        let first = choices.first();
        let first = first.ok_or_else(|| CudaError::Other(format!("cuBLASLt has no algorithm for {product:?}")))?.state;
        check(gpu, "cublasLtMatmulAlgoGetHeuristic", first)?;
        Ok(choices.iter().filter(|choice| choice.state == 0).map(|choice| choice.algorithm).collect())
    }

    /// The fastest candidate with the bits of the first: what was found before, or by a trial if there is time and memory for one.
    fn choose(
        &self,
        gpu: &Arc<Gpu>,
        product: &Product,
        tf32: bool,
        key: &ProductKey,
        candidates: &[Algorithm],
    ) -> Result<Algorithm, CudaError> {
        if candidates.len() < 2 || !is_worth_it(product) {
            return Ok(candidates[0]);
        }
        let name = self.cache_key(gpu, key)?;
        let kept = self.cache.as_ref().and_then(|cache| cache.read(&name));
        let known = kept.and_then(|kept| candidates.iter().find(|candidate| candidate.to_bytes() == kept));
        if let Some(algorithm) = known {
            return Ok(*algorithm);
        }
        let mut spent = lock(&self.tried_seconds);
        if *spent >= TRIALS_SECONDS_MAX {
            return Ok(candidates[0]);
        }
        let begin = Instant::now();
        // Without memory for a trial the first choice runs. It has the same bits.
        let trial = TrialMemory::new(gpu, product).ok().flatten();
        let best = trial.map(|memory| {
            let (addresses, bias) = memory.addresses();
            let call = self.describe(gpu, product, tf32, addresses, product.bias.map(|_| bias))?;
            winner(&mut Trial { open: self, gpu, memory, call, candidates }, candidates.len())
        });
        *spent += begin.elapsed().as_secs_f64();
        let Some(best) = best.transpose()? else { return Ok(candidates[0]) };
        if let Some(cache) = &self.cache {
            cache.write(&name, &candidates[best].to_bytes());
        }
        Ok(candidates[best])
    }

    /// A hash of all that the fastest algorithm depends on.
    fn cache_key(&self, gpu: &Gpu, key: &ProductKey) -> Result<[u8; 32], CudaError> {
        // SAFETY: it takes nothing and gives a number, which fits.
        let version = unsafe { (self.functions.version)() };
        let DeviceInfo { name, target, .. } = &gpu.info;
        let (driver, processors) = (gpu.driver.version()?, target.multiprocessors);
        let text = format!("{name}, {processors}, driver {driver}, cuBLASLt {version}, {WORKSPACE_BYTES}, {key:?}");
        Ok(*blake3::hash(text.as_bytes()).as_bytes())
    }
}

/// Candidates for one product.
struct Trial<'a> {
    open: &'a Open,
    gpu: &'a Gpu,
    memory: TrialMemory,
    call: ProductCall,
    candidates: &'a [Algorithm],
}

impl Contest for Trial<'_> {
    fn checksum(&mut self, candidate: usize, data: Data) -> Result<Option<u64>, CudaError> {
        self.memory.fill(data)?;
        self.call.algorithm = self.candidates[candidate];
        if self.open.run(self.gpu, &self.call).is_err() {
            return Ok(None);
        }
        self.memory.checksum().map(Some)
    }

    fn time(&mut self, candidate: usize, runs: usize) -> Result<f32, CudaError> {
        self.call.algorithm = self.candidates[candidate];
        let run = || (0..runs).try_for_each(|_| self.open.run(self.gpu, &self.call));
        Ok(self.memory.time(run)? / runs as f32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn structures_have_the_sizes_of_the_library() {
        assert_eq!((size_of::<Algorithm>(), size_of::<Choice>()), (64, 96));
    }

    #[test]
    fn alignment_counts_up_to_sixteen() {
        assert_eq!([0, 2, 4, 8, 24, 64, 256].map(|address| alignment(address, 0)), [16, 2, 4, 8, 8, 16, 16]);
    }

    #[test]
    fn a_batch_is_as_aligned_as_its_least_aligned_matrix() {
        assert_eq!([0, 2, 12, 96].map(|step| alignment(512, step)), [16, 2, 4, 16]);
    }
}
