//! NVIDIA's run-time compiler, if it is here: on the library path, or where `KOLO_NVRTC` says.

use std::ffi::{CStr, CString, c_char, c_int, c_void};

type Create =
    unsafe extern "C" fn(*mut *mut c_void, *const c_char, *const c_char, c_int, *const c_void, *const c_void) -> c_int;
type Compile = unsafe extern "C" fn(*mut c_void, c_int, *const *const c_char) -> c_int;
type Size = unsafe extern "C" fn(*mut c_void, *mut usize) -> c_int;
type Log = unsafe extern "C" fn(*mut c_void, *mut c_char) -> c_int;

#[derive(Debug)]
pub struct Compiler {
    handle: *mut c_void,
}

impl Compiler {
    pub fn find() -> Option<Self> {
        let named = std::env::var("KOLO_NVRTC").ok();
        let names = named.into_iter().chain(["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"].map(String::from));
        names.filter_map(|name| CString::new(name).ok()).find_map(|name| {
            // SAFETY: loading a library that is named so runs its own initialisers alone.
            let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW) };
            (!handle.is_null()).then_some(Self { handle })
        })
    }

    fn symbol(&self, name: &CStr) -> *mut c_void {
        // SAFETY: the library is loaded.
        let symbol = unsafe { libc::dlsym(self.handle, name.as_ptr()) };
        assert!(!symbol.is_null(), "NVRTC has no {name:?}");
        symbol
    }

    /// What the compiler says if the text does not compile.
    pub fn compile(&self, text: &str) -> Result<(), String> {
        let source = CString::new(text).expect("no zero byte");
        let options = [c"--gpu-architecture=sm_90a", c"--fmad=false", c"--std=c++17"].map(CStr::as_ptr);
        let mut program = std::ptr::null_mut();
        // SAFETY: the types are those of nvrtc.h, and every pointer outlives its call.
        unsafe {
            let create: Create = std::mem::transmute(self.symbol(c"nvrtcCreateProgram"));
            let compile: Compile = std::mem::transmute(self.symbol(c"nvrtcCompileProgram"));
            let size: Size = std::mem::transmute(self.symbol(c"nvrtcGetProgramLogSize"));
            let log: Log = std::mem::transmute(self.symbol(c"nvrtcGetProgramLog"));
            let name = c"kernel.cu".as_ptr();
            assert_eq!(create(&mut program, source.as_ptr(), name, 0, std::ptr::null(), std::ptr::null()), 0);
            if compile(program, options.len() as c_int, options.as_ptr()) == 0 {
                return Ok(());
            }
            let mut bytes = 0;
            size(program, &mut bytes);
            let mut text = vec![0u8; bytes + 1];
            log(program, text.as_mut_ptr().cast());
            Err(CStr::from_bytes_until_nul(&text).unwrap_or_default().to_string_lossy().into_owned())
        }
    }
}
