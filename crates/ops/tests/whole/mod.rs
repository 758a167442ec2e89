mod channel_order;
mod fuse;
mod gemm;
mod norm_chains;
mod page;
mod symbol;
