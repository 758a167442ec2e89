//! Workers together, from outside: real processes over every transport and under every launcher end in the same weights,
//! show one view, and fail with one message.

mod crashes;
mod digests;
mod hosts;
mod job;
mod layouts;
mod mpi;
mod output;
mod process;
mod signals;
mod slurm;
mod view;
