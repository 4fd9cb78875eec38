#![no_main]
genset_libfuzzer::target!(genset_fuzz::text::tokenizer_config);
