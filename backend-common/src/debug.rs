//! `debug_as!`: `Debug` of types with secrets, or with parts that have no `Debug`.

/// Implements `Debug`: `debug_as!(|it| Type { field: it.field, .. })` shows these fields, and `..` for all others.
#[doc(hidden)]
#[macro_export]
macro_rules! debug_as {
    (|$it:pat_param| $type:ident { $($field:ident: $value:expr,)* .. }) => {
        impl ::std::fmt::Debug for $type {
            fn fmt(&self, f: &mut ::std::fmt::Formatter<'_>) -> ::std::fmt::Result {
                let $it = self;
                f.debug_struct(stringify!($type))
                    $(.field(stringify!($field), &$value))*
                    .finish_non_exhaustive()
            }
        }
    };
}

#[cfg(test)]
mod tests {
    struct User {
        name: &'static str,
        password: &'static str,
    }

    crate::debug_as!(|it| User {
        name: it.name,
        has_password: !it.password.is_empty(),
        ..
    });

    struct Opaque;

    crate::debug_as!(|_| Opaque { .. });

    #[test]
    fn only_these_fields_are_shown() {
        let (name, password) = ("ann", "secret");
        let shown = format!("{:?} {Opaque:?}", User { name, password });
        assert_eq!(
            shown,
            "User { name: \"ann\", has_password: true, .. } Opaque { .. }"
        );
    }
}
