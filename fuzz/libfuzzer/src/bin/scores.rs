#![no_main]
genset_libfuzzer::target!(genset_fuzz::requests::scores);
