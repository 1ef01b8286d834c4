package demo

import (
	"embed"
	"regexp"
	"strings"

	"github.com/jackc/pgx/v5"
)

//go:embed sql
var files embed.FS

var names = regexp.MustCompile(`\b(demo_ledger|demo_log)\b|\bweir\.`)

// text is a statement of the folder sql, with the names of this run in it.
func (d *demo) text(name string) string {
	b, err := files.ReadFile("sql/" + name + ".sql")
	if err != nil {
		panic(err)
	}
	return names.ReplaceAllStringFunc(string(b), func(use string) string {
		switch use {
		case "demo_ledger":
			return pgx.Identifier{d.ledger}.Sanitize()
		case "demo_log":
			return d.log
		}
		return pgx.Identifier{strings.TrimSpace(d.o.Schema)}.Sanitize() + "."
	})
}
