//! Request planes: the one behaviour suite they all pass, what is particular to each, and peers that mean no good.

mod hostile_callees;
mod hostile_callers;
mod memory;
mod processes;
mod scripted;
mod suite;
mod tcp;
