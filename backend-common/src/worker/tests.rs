//! The shell, the adapter and the guard against an engine and a port that fail as planned, under a paused clock.

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
