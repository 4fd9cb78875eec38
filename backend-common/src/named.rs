//! `named!`: enums whose variants have names.

/// An enum with a name for each of its variants: `ALL`, `name` and `Display`; with `: FromStr` also the way back.
#[doc(hidden)]
#[macro_export]
macro_rules! named {
    (
        $(#[$attribute:meta])*
        pub enum $type:ident $(: $from:ident)? {
            $($(#[$of_variant:meta])* $variant:ident = $name:literal,)*
        }
    ) => {
        $(#[$attribute])*
        pub enum $type {
            $($(#[$of_variant])* $variant,)*
        }

        impl $type {
            /// Every one of them, in order.
            pub const ALL: [Self; [$($name),*].len()] = [$(Self::$variant),*];

            /// The name, as flags, the wire, metrics and logs have it: never changed.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $name,)*
                }
            }
        }

        impl ::std::fmt::Display for $type {
            fn fmt(&self, f: &mut ::std::fmt::Formatter<'_>) -> ::std::fmt::Result {
                f.write_str(self.name())
            }
        }

        $($crate::named!(@$from $type);)?
    };
    (@FromStr $type:ident) => {
        impl ::std::str::FromStr for $type {
            type Err = ::std::string::String;

            fn from_str(text: &str) -> ::std::result::Result<Self, ::std::string::String> {
                let found = Self::ALL.into_iter().find(|value| value.name() == text);
                found.ok_or_else(|| {
                    let names = Self::ALL.map(Self::name).join(", ");
                    ::std::format!("{text:?} is none of {names}")
                })
            }
        }
    };
}
