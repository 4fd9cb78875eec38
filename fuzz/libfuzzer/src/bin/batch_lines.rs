#![no_main]
genset_libfuzzer::target!(genset_fuzz::batches::batch_lines);
