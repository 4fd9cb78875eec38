#![no_main]
genset_libfuzzer::target!(genset_fuzz::router::kv_events);
