module compat

go 1.26.0
