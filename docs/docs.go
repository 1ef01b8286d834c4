// Package docs holds those of the documents that the command weir prints.
package docs

import _ "embed"

// Errors is errors.md.
//
//go:embed errors.md
var Errors string
