#![no_main]
genset_libfuzzer::target!(genset_fuzz::launcher::metrics);
