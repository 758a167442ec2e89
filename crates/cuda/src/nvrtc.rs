//! NVRTC, which compiles kernels while the program runs.

use crate::error::CudaError;
use crate::library::{Library, LibraryName, functions};
use kolo_graph::cuda::{CudaSource, PRELUDE};
use std::ffi::{CString, c_char, c_int, c_void};
use std::fmt::Write;
use std::sync::OnceLock;

pub(crate) const NVRTC: LibraryName = LibraryName {
    title: "NVRTC (libnvrtc)",
    files: &["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"],
    wheels: &["cu13", "cuda_nvrtc"],
    needed_for: "`--device cuda`, whose kernels it compiles",
    hint: "install a CUDA toolkit, or `pip install nvidia-cuda-nvrtc` and set VIRTUAL_ENV or LD_LIBRARY_PATH",
};

functions! {
    Nvrtc:
    version = "nvrtcVersion" (*mut c_int, *mut c_int);
    create = "nvrtcCreateProgram" (
        *mut *mut c_void, *const c_char, *const c_char, c_int, *const *const c_char, *const *const c_char
    );
    compile = "nvrtcCompileProgram" (*mut c_void, c_int, *const *const c_char);
    destroy = "nvrtcDestroyProgram" (*mut *mut c_void);
    log_size = "nvrtcGetProgramLogSize" (*mut c_void, *mut usize);
    log = "nvrtcGetProgramLog" (*mut c_void, *mut c_char);
    cubin_size = "nvrtcGetCUBINSize" (*mut c_void, *mut usize);
    cubin = "nvrtcGetCUBIN" (*mut c_void, *mut c_char);
}

/// How every source is compiled. Without contraction a fused chain gives the bits of its parts.
const OPTIONS: [&str; 2] = ["--fmad=false", "--std=c++17"];

/// The whole text of a source: what is defined, the prelude, the kernels.
pub(crate) fn whole_text(source: &CudaSource) -> String {
    let mut text = String::with_capacity(PRELUDE.len() + source.text.len() + 256);
    for (name, value) in &source.defines {
        let _ = writeln!(text, "#define {name} {value}");
    }
    text.push_str(PRELUDE);
    text.push('\n');
    text.push_str(&source.text);
    text
}

/// Such as `sm_90a`: with the instructions that this generation alone has.
pub(crate) fn architecture((major, minor): (u32, u32)) -> String {
    format!("sm_{major}{minor}{}", if major >= 9 { "a" } else { "" })
}

/// A program of NVRTC, given back when it is dropped.
struct Program<'n>(&'n Nvrtc, *mut c_void);

impl Drop for Program<'_> {
    fn drop(&mut self) {
        // SAFETY: made by `create` and destroyed once.
        unsafe { (self.0.destroy)(&mut self.1) };
    }
}

impl Nvrtc {
    pub fn get() -> Result<&'static Self, CudaError> {
        static LOADED: OnceLock<Result<Nvrtc, CudaError>> = OnceLock::new();
        LOADED.get_or_init(|| Self::load(&Library::open(NVRTC)?)).as_ref().map_err(CudaError::clone)
    }

    /// Major and minor.
    pub fn version(&self) -> (c_int, c_int) {
        let (mut major, mut minor) = (0, 0);
        // SAFETY: the places of two numbers. It cannot fail.
        unsafe { (self.version)(&mut major, &mut minor) };
        (major, minor)
    }

    /// What a compiled kernel depends on beside its text and architecture.
    pub fn settings(&self) -> String {
        let (major, minor) = self.version();
        format!("nvrtc {major}.{minor} {}", OPTIONS.join(" "))
    }

    /// Compiles a whole text to machine code.
    pub fn compile(&self, text: &str, arch: &str) -> Result<Vec<u8>, CudaError> {
        let wrong = |what: &str| CudaError::Compile { arch: arch.into(), log: what.into() };
        let words = |text: String| CString::new(text).map_err(|_| wrong("a zero byte in the source"));
        let (source, name) = (words(text.into())?, words("kolo.cu".into())?);
        let mut handle = std::ptr::null_mut();
        // SAFETY: texts that end in zeros, no headers.
        let code = unsafe {
            (self.create)(&mut handle, source.as_ptr(), name.as_ptr(), 0, std::ptr::null(), std::ptr::null())
        };
        if code != 0 {
            return Err(wrong(&format!("nvrtcCreateProgram failed with {code}")));
        }
        let program = Program(self, handle);
        let target = words(format!("--gpu-architecture={arch}"))?;
        let fixed = OPTIONS.map(|option| CString::new(option).unwrap_or_default());
        let options: Vec<*const c_char> = fixed.iter().chain([&target]).map(|option| option.as_ptr()).collect();
        // SAFETY: as many options as said, which end in zeros and live until the call is over.
        let code = unsafe { (self.compile)(program.1, options.len() as c_int, options.as_ptr()) };
        if code != 0 {
            return Err(wrong(&format!("{}\n(nvrtcCompileProgram failed with {code})", self.log(&program))));
        }
        let mut size = 0;
        // SAFETY: the place of a number, then of as many bytes as it says.
        let (code, cubin) = unsafe {
            (self.cubin_size)(program.1, &mut size);
            let mut cubin = vec![0u8; size];
            ((self.cubin)(program.1, cubin.as_mut_ptr().cast()), cubin)
        };
        if code != 0 || cubin.is_empty() {
            return Err(wrong(&format!("nvrtcGetCUBIN failed with {code}")));
        }
        Ok(cubin)
    }

    fn log(&self, program: &Program<'_>) -> String {
        let mut size = 0;
        // SAFETY: as in `compile`.
        let log = unsafe {
            (self.log_size)(program.1, &mut size);
            let mut log = vec![0u8; size];
            (self.log)(program.1, log.as_mut_ptr().cast());
            log
        };
        String::from_utf8_lossy(&log).trim_end_matches('\0').to_string()
    }
}
