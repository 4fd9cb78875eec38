#![no_main]
genset_libfuzzer::target!(genset_fuzz::discovery::discovery_record);
