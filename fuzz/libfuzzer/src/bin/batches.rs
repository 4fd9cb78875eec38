#![no_main]
genset_libfuzzer::target!(genset_fuzz::batches::batches);
