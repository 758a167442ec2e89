//! What cuBLASLt and cuDNN are told of operands and operations.

use crate::driver::Handle;
use std::ffi::c_int;

/// Something that was described to a library, destroyed by it when nobody needs it.
#[derive(Debug)]
pub(crate) struct Description {
    pub handle: Handle,
    pub destroy: unsafe extern "C" fn(Handle) -> c_int,
}

impl Drop for Description {
    fn drop(&mut self) {
        // SAFETY: made by the library's function for it, and destroyed once.
        unsafe { (self.destroy)(self.handle) };
    }
}
