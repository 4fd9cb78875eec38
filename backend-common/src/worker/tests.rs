//! Tests the shell, the adapter and the guard with an engine and a port that fail on schedule, under a paused clock.

mod adapters;
mod canary;
mod controls;
mod drain;
mod fakes;
mod faults;
mod limits;
mod load;
mod random;
mod refusals;
mod rules;
mod transcript;
