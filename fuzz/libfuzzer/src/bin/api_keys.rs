#![no_main]
genset_libfuzzer::target!(genset_fuzz::files::api_keys);
