package torture

import (
	"embed"
	"regexp"
	"strings"

	"github.com/jackc/pgx/v5"
)

//go:embed sql
var files embed.FS

var inSchema = regexp.MustCompile(`\bweir\.`)

// text is a statement of the folder sql, for the schema that Weir is installed in.
func text(schema, name string) string {
	b, err := files.ReadFile("sql/" + name + ".sql")
	if err != nil {
		panic(err)
	}
	return inSchema.ReplaceAllString(string(b), strings.ReplaceAll(pgx.Identifier{schema}.Sanitize(), "$", "$$")+".")
}
